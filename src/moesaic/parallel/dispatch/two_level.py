"""Expert parallelism over nodes: a row goes once to each node that serves it and is handed on inside.

    node 0             node 1                     ranks 4 to 7; each node has a proxy for every source,
    rank 0 ---row--->  rank 4 ---row---> rank 4   the rank of the same number where there is one
                              ---row---> rank 6
                              <-roots--- rank 6
           <--roots--  rank 4 joins what came back

The dispatcher is `Exchange` with nodes as its groups; here is only how its messages travel. Choices come back
one row each; of subtrees the proxy joins what its node holds together, so that fewer cross.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.experts.contract import Tag
from moesaic.parallel.dispatch.exchange import Exchange
from moesaic.parallel.dispatch.message import (
    Jobs,
    Returns,
    Sorted,
    addressed,
    bundle,
    open_jobs,
    open_roots,
    pack,
    pack_jobs,
    pack_roots,
    sort_jobs,
    starts,
    unbundle,
)
from moesaic.parallel.transport import Arrival, Purpose, Stage, Transport
from moesaic.parallel.tree import Subtrees, join_subtrees
from moesaic.placement.choice import ReplicaChoice
from moesaic.spec.experts import ExpertPlan
from moesaic.spec.model import MoeSpec
from moesaic.spec.numerics import Numerics


class TwoLevel(Exchange):
    """Both sides of one rank, and a proxy of its node for the ranks of its number on others.

    Ranks that follow each other share a node; the last node may have fewer. Without `slots` a copy of an
    expert on the own node goes first.
    """

    LANES: ClassVar[int] = 4

    def __init__(  # noqa: PLR0913 - as that of `Exchange`
        self,
        moe_layers: Sequence[tuple[int, MoeSpec]],
        numerics: Numerics,
        plan: ExpertPlan,
        transport: Transport,
        *,
        ranks_per_node: int,
        returns: Returns = "choices",
        slots: Sequence[Tensor] | None = None,
        replica_choice: ReplicaChoice = "turns",
        down_biases: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Raises: as `Exchange`; ConfigError for one sum per rank, and for nodes without ranks."""
        if ranks_per_node < 1:
            raise ConfigError(f"ranks_per_node must be at least 1, got {ranks_per_node}")
        if numerics.combine != "tree":
            raise ConfigError(
                f"two_level sums by the tree only, got combine = {numerics.combine}; the exchange dispatcher "
                "has it"
            )
        self._ranks_per_node = ranks_per_node
        super().__init__(
            moe_layers,
            numerics,
            plan,
            transport,
            returns=returns,
            slots=slots,
            replica_choice=replica_choice,
            group_size=ranks_per_node,
            down_biases=down_biases,
        )
        self._members = self._ranks_of(transport.rank // ranks_per_node)
        self._sources = {proxy: self._served_by(proxy) for proxy in self._members}
        self._handed_on: dict[Tag, list[Sorted]] = {}
        self._last: dict[int, _Relay] = {}  # by lane of the first exchange

    def _place(self, plan: ExpertPlan, slots: Sequence[Tensor] | None) -> None:
        super()._place(plan, slots)
        members = self._ranks_of(self.transport.rank // self._ranks_per_node)
        self._places = {
            layer_idx: _places([layer.num_slots[at] for at in members])
            for layer_idx, layer in self._layers.items()
        }

    # ---- who is whose proxy ----

    def _ranks_of(self, node: int) -> range:
        first = node * self._ranks_per_node
        return range(first, min(first + self._ranks_per_node, self.transport.num_ranks))

    def _proxy(self, node: int, source: int) -> int:
        ranks = self._ranks_of(node)
        return ranks[source % self._ranks_per_node % len(ranks)]

    def _served_by(self, proxy: int) -> list[int]:
        """The sources whose messages this proxy hands on."""
        node = proxy // self._ranks_per_node
        return [rank for rank in range(self.transport.num_ranks) if self._proxy(node, rank) == proxy]

    # ---- forth: to the proxies, then inside ----

    def _forth(self, messages: list[Tensor], tag: Tag) -> Arrival:
        me = self.transport.rank
        to_nodes = {self._proxy(node, me): message for node, message in enumerate(messages)}
        first = self._start(to_nodes, tag, 0, "send")
        return self._relay(first, lambda got: self._fan_out(got, tag), self._by_source, tag, 0)

    def _fan_out(self, messages: list[Tensor], tag: Tag) -> Arrival:
        """Each rank of this node gets its jobs and its rows of every message."""
        row_bytes = self._row_bytes(tag)
        member_L, slot_L = self._places[tag.layer_idx]
        parts: list[list[Tensor]] = []
        self._handed_on[tag] = []
        for source in self._sources[self.transport.rank]:
            got = open_jobs(messages[source], tag, row_bytes=row_bytes)
            member_J = member_L[got.slot_J]
            by = sort_jobs(member_J, got.row_J, len(self._members), len(got.rows_RB))
            jobs = Jobs(
                row_J=by.row_J,
                slot_J=slot_L[got.slot_J[by.order_J]],
                choice_J=got.choice_J[by.order_J],
                weight_J=got.weight_J[by.order_J],
                rows_RB=got.rows_RB.index_select(0, by.row_R),
            )
            parts.append(pack_jobs(tag, jobs, by))
            self._handed_on[tag].append(by)
        to_members = {rank: bundle([part[at] for part in parts]) for at, rank in enumerate(self._members)}
        return self._start(to_members, tag, 1, "send")

    def _by_source(self, messages: list[Tensor]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for proxy, sources in self._sources.items():
            found.update(zip(sources, unbundle(messages[proxy], len(sources)), strict=True))
        return addressed(found, self.transport.num_ranks)

    # ---- back: to the proxies inside, then to the sources ----

    def _back(self, messages: list[Tensor], tag: Tag) -> Arrival:
        to_proxies = {
            proxy: bundle([messages[source] for source in sources])
            for proxy, sources in self._sources.items()
        }
        first = self._start(to_proxies, tag, 2, "collect")
        return self._relay(first, lambda got: self._fan_in(got, tag), self._by_node, tag, 2)

    def _fan_in(self, messages: list[Tensor], tag: Tag) -> Arrival:
        """Each source gets what its jobs on this node came to, as one message."""
        sources, spec = self._sources[self.transport.rank], self._layers[tag.layer_idx].spec
        parts = [unbundle(messages[rank], len(sources)) for rank in self._members]
        join = self._join_choices if self._returns == "choices" else self._join_roots
        to_sources = {
            source: join([part[at] for part in parts], by, tag, spec)
            for at, (source, by) in enumerate(zip(sources, self._handed_on.pop(tag), strict=True))
        }
        return self._start(to_sources, tag, 3, "collect")

    def _by_node(self, messages: list[Tensor]) -> list[Tensor]:
        return [messages[self._proxy(node, self.transport.rank)] for node in range(self._num_groups)]

    def _join_choices(self, messages: list[Tensor], by: Sorted, tag: Tag, spec: MoeSpec) -> Tensor:
        out_JD = torch.cat([self._results(message, tag, spec) for message in messages])
        as_sent_JD = torch.empty_like(out_JD)
        as_sent_JD[by.order_J] = out_JD
        return pack(tag, (len(out_JD), 0), as_sent_JD)

    def _join_roots(self, messages: list[Tensor], by: Sorted, tag: Tag, spec: MoeSpec) -> Tensor:
        roots = [
            open_roots(message, tag, row_R, partial=self._partial, width=spec.row_width)
            for message, row_R in zip(messages, by.row_R.split(by.rows), strict=True)
        ]
        together = Subtrees(
            token_Q=torch.cat([one.token_Q for one in roots]),
            level_Q=torch.cat([one.level_Q for one in roots]),
            node_Q=torch.cat([one.node_Q for one in roots]),
            value_QD=torch.cat([one.value_QD for one in roots]),
        )
        return pack_roots(tag, join_subtrees(together, spec.experts_per_token))

    # ---- two exchanges as one ----

    def _start(self, messages: dict[int, Tensor], tag: Tag, lane: int, stage: Stage) -> Arrival:
        return self.transport.exchange(
            addressed(messages, self.transport.num_ranks),
            lane=self._lane(tag) + lane,
            purpose=Purpose(layer_idx=tag.layer_idx, stage=stage),
        )

    def _relay(
        self,
        first: Arrival,
        hand_on: Callable[[list[Tensor]], Arrival],
        finish: Callable[[list[Tensor]], list[Tensor]],
        tag: Tag,
        lane: int,
    ) -> Arrival:
        lane += self._lane(tag)
        self._last[lane] = _Relay(first, hand_on, finish, before=self._last.get(lane))
        return self._last[lane]


def _places(num_slots: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Of each slot of a node, whose ranks have so many: which of the ranks has it, and its number there."""
    counts = torch.tensor(num_slots)
    member_L = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return member_L, torch.arange(len(member_L)) - starts(num_slots)[member_L]


class _Relay(Arrival):
    """An exchange, and a second one of what the first brought; in the order of the first ones."""

    def __init__(
        self,
        first: Arrival,
        hand_on: Callable[[list[Tensor]], Arrival],
        finish: Callable[[list[Tensor]], list[Tensor]],
        *,
        before: _Relay | None,
    ) -> None:
        self._first = first
        self._hand_on = hand_on
        self._finish = finish
        self._before = before
        self._second: Arrival | None = None

    def ready(self) -> bool:
        return self._has_handed_on() and self._second is not None and self._second.ready()

    def wait(self, timeout_s: float) -> None:
        self._wait_to_hand_on(timeout_s)
        assert self._second is not None, "it was handed on"
        self._second.wait(timeout_s)

    def take(self) -> list[Tensor]:
        assert self._second is not None, "taken before it was there"
        return self._finish(self._second.take())

    def _has_handed_on(self) -> bool:
        if self._second is None:
            if (self._before is not None and not self._before._has_handed_on()) or not self._first.ready():
                return False
            self._start_second()
        return True

    def _wait_to_hand_on(self, timeout_s: float) -> None:
        if self._second is None:
            if self._before is not None:
                self._before._wait_to_hand_on(timeout_s)
            self._first.wait(timeout_s)
            self._start_second()

    def _start_second(self) -> None:
        self._second, self._before = self._hand_on(self._first.take()), None
