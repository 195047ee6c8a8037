"""KV bookkeeping: which blocks a request holds, which are shared, which may be reused. Holds no bytes.

Positions live in blocks of `kv_block` tokens, in one table per cache group. A block becomes reusable when its
last token was computed and committed, not when it was planned: a failed step leaves nothing wrong behind.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from moesaic.errors import ConfigError
from moesaic.sched.key import KvKey, KvKeyScope
from moesaic.sched.prefix import BlockPool
from moesaic.sched.step import BlockIds
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import KvFormat

NO_BLOCK = -1  # in a window group's table: the positions fell out of the window and their block was freed


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroup:
    """Layers that keep the same kind of cache over the same window, so one block table serves them all."""

    kind: Literal["tokens", "window", "state"]
    window: int | None  # positions visible, the query's own included; only of kind "window"
    layer_idxs: tuple[int, ...]
    block_bytes: int  # one block of every layer of the group; 0 for states
    sequence_bytes: int  # one state slot of every layer of the group; 0 for tokens and windows

    @property
    def unit_bytes(self) -> int:
        """Bytes of what the group's pool hands out: a block, or a state slot."""
        return self.sequence_bytes if self.kind == "state" else self.block_bytes

    def first_live_idx(self, position: int, kv_block: int) -> int:
        """The first block that a query at `position` or later may still read."""
        return 0 if self.window is None else max(0, position - self.window + 1) // kv_block

    def min_units(self, kv_block: int) -> int:
        """The fewest blocks (or slots) with which one request of any length advances token by token."""
        if self.kind == "state":
            return STATE_SLOTS
        return 1 if self.window is None else -(-(self.window - 1) // kv_block) + 1


STATE_SLOTS = 2  # a state is read from one slot and written to the other, so that a step can be run twice


def cache_groups(spec: ModelSpec, kv_format: KvFormat, kv_block: int) -> tuple[CacheGroup, ...]:
    """The cache groups of a model, ordered by their first layer: the order of every per-group tuple."""
    layers: dict[tuple[Literal["tokens", "window", "state"], int | None], list[int]] = {}
    token_bytes: Counter[tuple[str, int | None]] = Counter()
    sequence_bytes: Counter[tuple[str, int | None]] = Counter()
    for layer_idx, layer in enumerate(spec.layers):
        for cache in layer.caches(kv_format):
            key = (cache.kind, cache.window)
            members = layers.setdefault(key, [])
            if layer_idx not in members:
                members.append(layer_idx)
            token_bytes[key] += cache.bytes_per_token
            sequence_bytes[key] += cache.bytes_per_sequence
    return tuple(
        CacheGroup(
            kind=kind,
            window=window,
            layer_idxs=tuple(members),
            block_bytes=kv_block * token_bytes[kind, window],
            sequence_bytes=sequence_bytes[kind, window],
        )
        for (kind, window), members in layers.items()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """The longest reusable prefix: `num_tokens` positions, and per group the blocks that hold them."""

    num_tokens: int
    blocks: tuple[BlockIds, ...]  # NO_BLOCK below a window


@dataclass(kw_only=True, slots=True, eq=False)
class Grant:
    """What one request holds. Only the ledger writes to it.

    Owns:    every block in `tables` and both state slots, until `KvLedger.release`.
    """

    request_id: str
    num_cached: int  # leading positions found in the prefix cache
    tables: list[list[int]]
    state_slots: tuple[int, ...]  # empty without state groups
    num_full: int  # leading blocks that are computed
    num_places: int  # leading positions that have a place in every group
    _seen: tuple[BlockIds, ...] | None = field(init=False, default=None)  # the last answer of `blocks`
    _seen_count: int = field(init=False, default=0)

    def blocks(self, num_tokens: int, kv_block: int) -> tuple[BlockIds, ...]:
        """Per group the ids of the blocks of positions 0 .. num_tokens; no ids for state groups."""
        count = -(-num_tokens // kv_block)
        if self._seen is None or self._seen_count != count:
            self._seen = tuple(tuple(table[:count]) for table in self.tables)
            self._seen_count = count
        return self._seen

    def touch(self) -> None:
        """Note that a block of a table changed."""
        self._seen = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KvUsage:
    """Where the bytes of the pools are. Their sum, own bytes of all requests included, is `total_bytes`.

    Units:   bytes over all layers; per group in group order.
    """

    own_bytes: dict[str, tuple[int, ...]]  # request id -> held by this request alone
    held_bytes: dict[str, tuple[int, ...]]  # request id -> held at all; shared blocks count for each holder
    shared_bytes: int  # held by several requests, counted once
    idle_bytes: int  # kept for reuse only
    free_bytes: int
    total_bytes: int


class KvLedger:
    """Blocks of every cache group of one attention replica.

    Owns:    a `Grant` from `reserve` must be released exactly once.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        *,
        kv_block: int,
        scope: KvKeyScope,
        has_prefix_cache: bool = True,
    ) -> None:
        if len(groups) != len(num_blocks):
            raise ConfigError(f"{len(groups)} cache groups need as many pool sizes, got {len(num_blocks)}")
        for group, count in zip(groups, num_blocks, strict=True):
            if count < group.min_units(kv_block):
                raise ConfigError(
                    f"the {group.kind} cache of layer {group.layer_idxs[0]} and its like needs at least "
                    f"{group.min_units(kv_block)} units of {group.unit_bytes} bytes, got {count}: "
                    "give the KV pool more memory"
                )
        self.groups = tuple(groups)
        self.num_blocks = tuple(num_blocks)
        self.kv_block = kv_block
        self.scope = scope
        # A state is a sum over all tokens before it: without a snapshot at the hit there is nothing to reuse.
        self.has_prefix_cache = has_prefix_cache and all(group.kind != "state" for group in groups)
        self._pools = tuple(BlockPool(count) for count in num_blocks)
        self._paged = tuple(i for i, group in enumerate(groups) if group.kind != "state")
        self._windowed = tuple(i for i, group in enumerate(groups) if group.kind == "window")
        self._states = tuple(i for i, group in enumerate(groups) if group.kind == "state")
        self._grants: dict[str, Grant] = {}
        assert len(self._states) <= 1, "all state layers form one group, so a request has one pair of slots"

    def twin(self) -> KvLedger:
        """An empty ledger of the same shape, for another replica."""
        return KvLedger(
            self.groups,
            self.num_blocks,
            kv_block=self.kv_block,
            scope=self.scope,
            has_prefix_cache=self.has_prefix_cache,
        )

    # -- what there is -----------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int | None:
        """Positions that one request alone can hold; None: no limit, as only windows and states are kept."""
        counts = [self.num_blocks[i] for i in self._paged if self.groups[i].kind == "tokens"]
        return min(counts) * self.kv_block if counts else None

    @property
    def num_used(self) -> int:
        """Blocks and slots held by requests, over all groups."""
        return sum(pool.num_held for pool in self._pools)

    @property
    def num_total(self) -> int:
        """Blocks and slots over all groups."""
        return sum(self.num_blocks)

    def watch(self) -> None:
        """Collect from now on which blocks become findable and stop being so, for a fleet's directory."""
        for i in self._paged[:1]:  # every group holds the same keys, windows fewer of them
            self._pools[i].changes = []

    def take_changes(self) -> tuple[tuple[KvKey, bool], ...]:
        """(key, is findable) in order, since the last call."""
        pools = [self._pools[i] for i in self._paged[:1]]
        found = tuple(change for pool in pools for change in pool.changes or ())
        for pool in pools:
            pool.changes = []
        return found

    # -- the life of a grant -----------------------------------------------------------------------

    def match(self, keys: Sequence[KvKey], num_tokens: int) -> Match:
        """The longest prefix of `num_tokens` tokens that every group holds, leaving at least one to compute.

        `keys` are those of the full blocks. A window group holds a prefix when it holds all that the next
        position sees of it. The match stays valid until the next call that takes blocks.
        """
        limit = min(len(keys), (num_tokens - 1) // self.kv_block) if self.has_prefix_cache else 0
        found: list[list[int | None]] = [[] for _ in self.groups]
        for i in self._paged:
            pool = self._pools[i]
            for key in keys[:limit]:
                block_id = pool.find(key)
                if block_id is None and self.groups[i].kind == "tokens":
                    break
                found[i].append(block_id)
            limit = len(found[i])
        num_blocks = self._longest_run(found, limit)
        blocks: list[BlockIds] = []
        for group, ids in zip(self.groups, found, strict=True):
            first = group.first_live_idx(num_blocks * self.kv_block, self.kv_block)
            blocks.append(
                tuple(
                    NO_BLOCK if idx < first or block_id is None else block_id
                    for idx, block_id in enumerate(ids[:num_blocks])
                )
            )
        return Match(num_tokens=num_blocks * self.kv_block, blocks=tuple(blocks))

    def _longest_run(self, found: list[list[int | None]], limit: int) -> int:
        """The most leading blocks at which no window group misses a block that it would read."""
        runs: list[tuple[CacheGroup, list[int]]] = []
        for i in self._windowed:
            run = [0]  # run[n]: blocks present without a gap, ending before block n
            for block_id in found[i][:limit]:
                run.append(0 if block_id is None else run[-1] + 1)
            runs.append((self.groups[i], run))
        best = limit
        while any(
            run[best] < best - group.first_live_idx(best * self.kv_block, self.kv_block)
            for group, run in runs
        ):
            best -= 1
        return best

    def reserve(
        self, request_id: str, num_tokens: int, match: Match | None = None, *, num_spare: int = 0
    ) -> Grant | None:
        """Open a grant: the matched prefix, and room for what follows.

        Groups that keep every token get places for all `num_tokens`, windows for the next token only
        (`extend` gives the rest), states a pair of slots. Returns None and changes nothing unless that leaves
        `num_spare` blocks in every paged group.
        """
        assert request_id not in self._grants, f"request {request_id} already holds a grant"
        match = match or Match(num_tokens=0, blocks=((),) * len(self.groups))
        needs = [0] * len(self.groups)
        for i, (group, pool) in enumerate(zip(self.groups, self._pools, strict=True)):
            if group.kind == "state":
                needs[i] = STATE_SLOTS
                shortage = needs[i] > pool.num_available
            else:
                end = num_tokens if group.kind == "tokens" else match.num_tokens + 1
                needs[i] = -(-end // self.kv_block) - len(match.blocks[i])
                num_idle = sum(1 for b in match.blocks[i] if b != NO_BLOCK and pool.refs(b) == 0)
                shortage = needs[i] + num_idle + num_spare > pool.num_available
            if shortage:
                return None
        for i in self._paged:
            for block_id in match.blocks[i]:
                if block_id != NO_BLOCK:
                    self._pools[i].hold(block_id)
        tables = [
            [*match.blocks[i], *(self._pools[i].take() for _ in range(needs[i]))] if i in self._paged else []
            for i in range(len(self.groups))
        ]
        slots = tuple(self._pools[i].take() for i in self._states for _ in range(STATE_SLOTS))
        grant = Grant(
            request_id=request_id,
            num_cached=match.num_tokens,
            tables=tables,
            state_slots=slots,
            num_full=match.num_tokens // self.kv_block,
            num_places=self._places(tables),
        )
        self._grants[request_id] = grant
        return grant

    def reach(self, grant: Grant) -> int:
        """Positions [0, n) for which `extend` can give places now."""
        return min(
            ((len(grant.tables[i]) + self._pools[i].num_available) * self.kv_block for i in self._paged),
            default=sys.maxsize,
        )

    def extend(self, grant: Grant, num_tokens: int) -> None:
        """Give places to positions [0, num_tokens) in every group; at most `reach`."""
        count = -(-num_tokens // self.kv_block)
        for i in self._paged:
            table = grant.tables[i]
            if len(table) < count:
                table.extend(self._pools[i].take() for _ in range(count - len(table)))
        grant.num_places = self._places(grant.tables)

    def _places(self, tables: Sequence[Sequence[int]]) -> int:
        return min((len(tables[i]) * self.kv_block for i in self._paged), default=sys.maxsize)

    def commit(self, grant: Grant, num_tokens: int, keys: Sequence[KvKey]) -> None:
        """Note that positions [0, num_tokens) are computed.

        Full blocks become reusable under `keys`; blocks that no later position sees are given back.
        """
        num_full = num_tokens // self.kv_block
        if num_full > grant.num_full:
            if self.has_prefix_cache:
                for i in self._paged:
                    for idx in range(grant.num_full, num_full):
                        self._pools[i].publish(grant.tables[i][idx], keys[idx])
            grant.num_full = num_full
        for i in self._windowed:
            self._drop_before(grant, i, self.groups[i].first_live_idx(num_tokens, self.kv_block))

    def _drop_before(self, grant: Grant, group_idx: int, first_idx: int) -> None:
        table = grant.tables[group_idx]
        idx = first_idx - 1
        while idx >= 0 and table[idx] != NO_BLOCK:
            idx -= 1
        for dead_idx in range(idx + 1, first_idx):
            self._pools[group_idx].drop(table[dead_idx])
            table[dead_idx] = NO_BLOCK
            grant.touch()

    def release(self, grant: Grant, *, is_suspect: bool = False) -> None:
        """Give everything back, last block first, so that the ends of chains are evicted before their starts.

        A suspect grant's blocks are not kept for reuse: what was computed from them went wrong.
        """
        assert self._grants.get(grant.request_id) is grant, f"grant of {grant.request_id} released twice"
        del self._grants[grant.request_id]
        for i in self._paged:
            pool = self._pools[i]
            for block_id in reversed(grant.tables[i]):
                if block_id != NO_BLOCK:
                    if is_suspect:
                        pool.forget(block_id)
                    pool.drop(block_id)
        for i in self._states:
            for slot in grant.state_slots:
                self._pools[i].drop(slot)

    # -- accounting --------------------------------------------------------------------------------

    def usage(self) -> KvUsage:
        """Where every byte is, per request; costs one look at every held block."""
        own: dict[str, tuple[int, ...]] = {}
        held: dict[str, tuple[int, ...]] = {}
        for request_id, grant in self._grants.items():
            own_units, held_units = [], []
            for group, pool, ids in zip(self.groups, self._pools, self._units(grant), strict=True):
                held_units.append(len(ids) * group.unit_bytes)
                own_units.append(sum(1 for b in ids if pool.refs(b) == 1) * group.unit_bytes)
            own[request_id], held[request_id] = tuple(own_units), tuple(held_units)
        pairs = tuple(zip(self.groups, self._pools, strict=True))
        return KvUsage(
            own_bytes=own,
            held_bytes=held,
            shared_bytes=sum(g.unit_bytes * p.num_held for g, p in pairs) - sum(map(sum, own.values())),
            idle_bytes=sum(g.unit_bytes * p.num_idle for g, p in pairs),
            free_bytes=sum(g.unit_bytes * (p.num_available - p.num_idle) for g, p in pairs),
            total_bytes=sum(g.unit_bytes * p.num_blocks for g, p in pairs),
        )

    def _units(self, grant: Grant) -> list[list[int]]:
        """Per group, the block ids or state slots that a grant holds."""
        return [
            list(grant.state_slots) if i in self._states else [b for b in grant.tables[i] if b != NO_BLOCK]
            for i in range(len(self.groups))
        ]

    def check(self) -> None:
        """Verify that every block is in one place and held by exactly those that claim it; for tests."""
        holders: list[Counter[int]] = [Counter() for _ in self.groups]
        for grant in self._grants.values():
            for counter, ids in zip(holders, self._units(grant), strict=True):
                assert len(set(ids)) == len(ids), f"{grant.request_id} holds a block twice"
                counter.update(ids)
        for pool, counter in zip(self._pools, holders, strict=True):
            pool.check(counter)
