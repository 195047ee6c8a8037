"""Consecutive layers in one native call: bit for bit what their halves give one after the other.

    Python:   start |                                                      | tell routings
    kernels:        | attention 0 | experts 0 | attention 1 | experts 1 ...|

Over ranks the call may stop where nothing can be done without waiting. Knows no checkpoint and no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from weakref import ref

import torch
from torch import Tensor

from moesaic.errors import PeerLost
from moesaic.experts.contract import Observe, Tag
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.native.attention import pointers
from moesaic.kernels.native.moe import TIMEOUT_S, timed_out
from moesaic.kernels.native.stack import NativeStack, StackLayer
from moesaic.kv.pool import BatchLayout, KvPool
from moesaic.layers.attention import FusedGqa
from moesaic.layers.rope import RopeTable
from moesaic.parallel.dispatch.fused import FusedHalf, Room, Rooms
from moesaic.parallel.dispatch.fused_ranks import FusedRanksHalf
from moesaic.steps import Steps, Wait


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FusedLayerHalves:
    """A layer both halves of which are native calls, so that it can be one of a stack."""

    layer_idx: int
    mixer: FusedGqa
    ffn: FusedHalf | FusedRanksHalf

    @classmethod
    def of(cls, layer_idx: int, mixer: object, ffn: object) -> FusedLayerHalves | None:
        """None for a layer that has other halves."""
        if isinstance(mixer, FusedGqa) and isinstance(ffn, FusedHalf | FusedRanksHalf):
            return cls(layer_idx=layer_idx, mixer=mixer, ffn=ffn)
        return None

    def follows(self, other: FusedLayerHalves) -> bool:
        """Whether one call can have both."""
        return type(self.ffn) is type(other.ffn) and (
            self.ffn.spec.experts_per_token == other.ffn.spec.experts_per_token
        )


class LayerStack:
    """Some layers; made where consecutive ones have native halves.

    Addresses of weights and pools are bound once for each micro-batch, and again when a plan was adopted or
    another pool comes.
    """

    def __init__(self, layers: Sequence[FusedLayerHalves]) -> None:
        """`layers` are consecutive and follow each other."""
        self._layers = tuple(layers)
        first = self._layers[0].ffn
        self._experts = first.experts
        self._seam = torch_dtype(self._layers[0].mixer.ops.numerics.seam_dtype)
        self._width, self._num_choices = first.spec.row_width, first.spec.experts_per_token
        self._is_over_ranks = isinstance(first, FusedRanksHalf)
        self._rooms = Rooms(self._num_choices, len(self._layers))
        ropes = (layer.mixer.rope for layer in self._layers)
        self._ropes = list(dict.fromkeys(rope for rope in ropes if rope is not None))
        self._held = self._experts.held()  # what calls were bound under
        self._calls: dict[int, _Call] = {}

    def forward(
        self, x_TD: Tensor, batch: BatchLayout, pool: KvPool, tag: Tag, observe: Observe | None
    ) -> Steps[Tensor]:
        """The residual stream after all layers, in the seam dtype; waits over ranks only.

        Raises: KernelTimeout as a sparse half; PeerLost from a wait, through whoever drives.
        """
        assert x_TD.dtype == self._seam, f"rows are {x_TD.dtype}, the seam is {self._seam}"
        num_tokens = x_TD.numel() // self._width  # a tensor's len takes ten times as long
        room = self._rooms.of(num_tokens, tag.micro_batch)
        call = self._call(pool, tag.micro_batch)
        y_TD = call.start(x_TD, batch, room, tag)
        if self._is_over_ranks:
            while not call.is_over:
                yield call.next_layer()
        else:
            call.finish()
        self._experts.count(num_tokens * self._num_choices * len(self._layers))
        if observe is not None:
            for layer, routing in zip(self._layers, room.routings, strict=True):
                observe(layer.ffn.moe_idx, routing)
        return y_TD

    def _call(self, pool: KvPool, micro_batch: int) -> _Call:
        held = self._experts.held()
        if held != self._held:
            self._calls.clear()  # all hold weights that may have moved
            self._held = held
        call = self._calls.get(micro_batch)
        if call is None or call.pool() is not pool:
            call = self._calls[micro_batch] = self._bind(pool, micro_batch)
        return call

    def _bind(self, pool: KvPool, micro_batch: int) -> _Call:
        groups = sorted({pool.group_of(layer.layer_idx) for layer in self._layers})
        layers = []
        for layer in self._layers:
            keys, values = pool.tensors(layer.layer_idx)
            assert values is not None, "keys and values have a pool each"
            rope = layer.mixer.rope
            layers.append(
                StackLayer(
                    attention=layer.mixer.layer,
                    sparse=layer.ffn.native(micro_batch),
                    keys=keys,
                    values=values,
                    places=groups.index(pool.group_of(layer.layer_idx)),
                    rope=-1 if rope is None else self._ropes.index(rope),
                )
            )
        native = self._layers[0].mixer.ops.layer_stack(layers, len(groups), len(self._ropes))
        return _Call(native, len(layers), pool, groups, self._ropes)


class _Call(Wait):
    """The calls of one micro-batch, one for each forward: over when whoever waits has waited for all layers.

    As a wait it is for the next layer, and goes on as far as it can.
    """

    def __init__(
        self,
        native: NativeStack,
        num_layers: int,
        pool: KvPool,
        groups: Sequence[int],
        ropes: Sequence[RopeTable],
    ) -> None:
        self.pool = ref(pool)  # whoever owns it may let it go
        self.is_over = True
        self._native = native
        self._num_layers = num_layers
        self._groups = tuple(groups)
        self._ropes = tuple(ropes)
        self._used: tuple[Tensor, Tensor, BatchLayout, Room, Tag] | None = (
            None  # the call has addresses of it
        )
        self._num_over: int | None = None  # layers; None: not begun
        self._awaited = 0

    def start(self, x_TD: Tensor, batch: BatchLayout, room: Room, tag: Tag) -> Tensor:
        """Where the result will be, once this is over."""
        x_TD = x_TD.contiguous()
        y_TD = torch.empty_like(x_TD)
        self._used = x_TD, y_TD, batch, room, tag
        self._num_over, self.is_over = None, False
        return y_TD

    def finish(self) -> None:
        """Compute all layers, of which none waits for a rank."""
        used = self._used
        try:
            self._go_on(TIMEOUT_S)
        except TimeoutError as error:
            raise timed_out(error, self._native, used) from error

    def next_layer(self) -> _Call:
        """The wait for one layer more than are over now."""
        self._awaited = 1 + (self._num_over or 0)
        return self

    def ready(self) -> bool:
        """Whether that layer is over, after all that can be done without waiting."""
        self._go_on(0.0)
        return self.is_over or (self._num_over or 0) >= self._awaited

    def wait(self, timeout_s: float) -> None:
        """Until all are over; each layer may take as long as that."""
        self._go_on(timeout_s)
        if not self.is_over:
            rank, layer_idx, stage, waited_s = self._native.late()
            seconds = waited_s if waited_s >= timeout_s else 0.0  # before that time: its process has ended
            raise PeerLost(rank=rank, layer_idx=layer_idx, stage=stage, seconds=seconds)

    def _go_on(self, timeout_s: float) -> None:
        if self._used is None:
            return
        if self._num_over is not None:
            self._num_over = self._native.advance(timeout_s)
        else:
            self._num_over = self._begin(*self._used, timeout_s)
        if self._num_over == self._num_layers:
            self._used, self.is_over = None, True

    def _begin(
        self, x_TD: Tensor, y_TD: Tensor, batch: BatchLayout, room: Room, tag: Tag, timeout_s: float
    ) -> int:
        places = [pointers(batch.kv_places(group)) for group in self._groups]
        tables = [rope.rows(batch.num_positions) for rope in self._ropes]
        num_over: int = self._native.begin(
            x_TD.data_ptr(),
            x_TD.numel(),
            y_TD.data_ptr(),
            room.num_tokens,
            batch.positions_T.data_ptr(),
            places[0] if len(places) == 1 else list(chain.from_iterable(places)),
            [number for cos, sin in tables for number in (cos.data_ptr(), sin.data_ptr(), *cos.shape)],
            room.experts,
            room.weights,
            tag.epoch,
            tag.plan_version,
            tag.step_id,
            timeout_s,
        )
        return num_over
