"""Python of a layer at batch 1: its time with native calls that return at once, in us a layer.

Parts are norm, router's matmul, gate, experts and residual, a call each; the half is one call for all; the
stack is one call for all layers, their attention too. Over ranks each is of a rank that is alone in its
segment. Layers are driven as a decoder drives them, without an observer and with the one that the engine
counts experts by. An empty call is a call of a Python function, about as dear as the way into the compiled
module.

    python bench/layer_python.py
    python bench/layer_python.py --json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from table import describe, spread

from moesaic.audit.bench.report import load_average
from moesaic.engine.batch import Census, MicroBatch
from moesaic.experts.blob import BlobLayout
from moesaic.experts.contract import Observe, SparseHalf, Tag
from moesaic.experts.router import Router
from moesaic.experts.store import ExpertLoader, ResidentStore
from moesaic.kernels import native
from moesaic.kernels.kv_format import pool_zeros
from moesaic.kernels.native.ops import NativeOps
from moesaic.kernels.ops import choose
from moesaic.kv.pool import BatchLayout
from moesaic.layers.attention import GqaAttention, KvPlaces, KvRow, PagedAttend
from moesaic.layers.norm import RmsNorm
from moesaic.layers.rope import RopeTable
from moesaic.models.decoder import FfnHalf
from moesaic.models.moe_block import MoeBlock
from moesaic.models.stack import FusedLayerHalves, LayerStack
from moesaic.parallel.dispatch.build import lane_sizes
from moesaic.parallel.dispatch.fused import Fused, FusedHalf
from moesaic.parallel.dispatch.fused_ranks import FusedLayer, FusedRanks, FusedRanksHalf
from moesaic.parallel.shared_memory import SharedMemoryTransport, segments_in_one_process
from moesaic.sched.step import RowPlan
from moesaic.spec.deployment import Grid, Layout
from moesaic.spec.experts import contiguous_plan
from moesaic.spec.model import GateSpec, GqaSpec, MoeSpec, RopeSpec
from moesaic.spec.numerics import Numerics, preset
from moesaic.steps import Steps, drive

Forward = Callable[[torch.Tensor, Observe | None], Steps[torch.Tensor]]
NUM_LAYERS, NUM_EXPERTS, NUM_CHOICES, WIDTH = 16, 64, 8, 64
SPEC = MoeSpec(
    num_experts=NUM_EXPERTS,
    experts_per_token=NUM_CHOICES,
    expert_width=32,
    gate=GateSpec(score="softmax"),
    shared=None,
    row_width=WIDTH,
)
ATTENTION = GqaSpec(
    num_heads=2, num_kv_heads=2, head_dim=32, softmax_scale=1.0, rope=RopeSpec(theta=1e4, dim=32)
)
TAG = Tag(epoch=0, plan_version=0, step_id=0, micro_batch=0, chunk=0, layer_idx=0)


def nothing(*told: Any) -> bool:
    """A native call without a body; over ranks: over at once."""
    return True


def no_choice(logits: int, bias: int, scale: int, experts: int, *told: Any) -> None:
    """Every choice is expert 0."""
    ctypes.memset(experts, 0, 8 * NUM_CHOICES)


EMPTY = SimpleNamespace(norm=nothing, linear=nothing, gate=no_choice, moe=nothing, moe_half=nothing)


def make_experts(numerics: Numerics) -> ResidentStore:
    """All zeros."""
    loader = ExpertLoader(((0, SPEC),), numerics.formats)
    for part, place in BlobLayout.of(SPEC, "bfloat16").places.items():
        loader.put_stack(0, part, torch.zeros((NUM_EXPERTS, *place.shape)))
    return loader.finish()


def make_routed(ops: NativeOps, over_ranks: bool) -> Fused | FusedLayer:
    """One layer's experts, on one rank or over ranks of which there is one."""
    store = make_experts(ops.numerics)
    if not over_ranks:
        return Fused(0, SPEC, store, ops)
    layout = Layout(  # what such a rank asks for; here it is alone
        attention=Grid(axes={"dp": 2}, ranks=(0, 1)),
        experts=Grid(axes={"ep": 2}, ranks=(0, 1)),
        dispatcher="shared_memory",
        is_fused=True,
    )
    [end] = segments_in_one_process(1, lane_sizes(layout, ((0, SPEC),), ops.numerics, 64))
    ranks = FusedRanks(
        ((0, SPEC),), ops.numerics, contiguous_plan((NUM_EXPERTS,), 1), SharedMemoryTransport(end)
    )
    return ranks.layer(0, SPEC, store, ops)


def make_calls(level: str, over_ranks: bool) -> dict[str, Forward]:
    """Layers part by part, half by half and in one call, all of whose native calls are empty."""
    ops = choose(preset("portable", dtype="bfloat16", backend=f"native/{level}"), num_threads=1)
    assert isinstance(ops, NativeOps)
    norm = RmsNorm(torch.ones(WIDTH, dtype=torch.bfloat16), 1e-5, ops)
    router, routed = (
        Router(SPEC, torch.zeros(NUM_EXPERTS, WIDTH), None, None, ops),
        make_routed(ops, over_ranks),
    )
    native_router = router.fused(0, norm.weight_D, norm.eps)
    assert native_router is not None
    half: Any = routed.half(0, native_router)
    stacked = make_stack(ops, half, norm)
    ops._kernels = ops._layers._kernels = EMPTY
    for bound in (routed, half):
        if isinstance(routed, Fused):
            routed._layer._kernels = EMPTY
        else:
            bound._bound.calls[0].layer.begin = nothing
    half._rooms.of(1, 0).routings[0].experts_TK.zero_()
    block = MoeBlock(moe_idx=0, router=router, routed=routed, shared=None)
    parts = FfnHalf(layer_idx=0, norm=norm, ffn=block)
    return {
        "parts": lambda x_TD, observe: one_by_one(parts, x_TD, observe),
        "half": lambda x_TD, observe: one_by_one(half, x_TD, observe),
        "stack": stacked,
    }


class Pool:
    """What a stack asks of a pool of one cache group."""

    def group_of(self, layer_idx: int) -> int:
        """The only one."""
        return 0

    def tensors(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values."""
        shape = (2, ATTENTION.num_kv_heads, 16, ATTENTION.head_dim)
        return pool_zeros(shape, "bfloat16"), pool_zeros(shape, "bfloat16")


def make_stack(ops: NativeOps, half: FusedHalf | FusedRanksHalf, norm: RmsNorm) -> Forward:
    """All layers in one call, of which nothing is computed."""
    shape = dict.fromkeys("qkvo", torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16))
    rope = RopeTable(ATTENTION.rope, 64) if ATTENTION.rope is not None else None
    attend = PagedAttend.of(ATTENTION, ops)
    mixer = GqaAttention(ATTENTION, shape, ops, rope, attend, norm_eps=norm.eps).fused(0, norm)
    assert mixer is not None
    one = FusedLayerHalves(layer_idx=0, mixer=mixer, ffn=half)
    stack: Any = LayerStack([one] * NUM_LAYERS)
    pool: Any = Pool()
    row = KvRow(first_row=0, num_tokens=1, start_idx=9, blocks=(0,))
    places = KvPlaces.of((row,), ops.numerics.kv_block)
    batch = BatchLayout(positions_T=torch.tensor([9]), num_positions=10, places=(places,))
    for routing in stack._rooms.of(1, 0).routings:
        routing.experts_TK.zero_()
    stack._call(pool, 0)._native.begin = lambda *told: NUM_LAYERS
    return lambda x_TD, observe: stack.forward(x_TD, batch, pool, TAG, observe)


def make_observer() -> Observe:
    """The engine's, of one decoding sequence."""
    row = RowPlan(
        request_id="r",
        start_idx=9,
        num_tokens=1,
        is_sampled=True,
        token_ids=(1,),
        blocks=((0,),),
        state_from=None,
        state_to=None,
    )
    return Census([NUM_EXPERTS], keeps_routes=False).observer(MicroBatch.of((row,), [5]))


def one_by_one(
    half: FfnHalf | SparseHalf, x_TD: torch.Tensor, observe: Observe | None
) -> Steps[torch.Tensor]:
    """Layers as in `Decoder.forward`."""
    for _ in range(NUM_LAYERS):
        x_TD = yield from half.forward(x_TD, TAG, observe)
    return x_TD


@torch.inference_mode()
def measure(forward: Forward, observe: Observe | None, num_calls: int) -> list[float]:
    """Microseconds of a layer, of each call of some layers."""
    x_TD, times = torch.zeros((1, WIDTH), dtype=torch.bfloat16), []
    for _ in range(num_calls):
        began_s = time.perf_counter()
        drive([forward(x_TD, observe)], 1.0)
        times.append(1e6 * (time.perf_counter() - began_s) / NUM_LAYERS)
    return times[num_calls // 10 :]


def main() -> None:
    """Print a table, or JSON for bench/results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", default=native.levels()[-1], choices=native.levels())
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before, rows = load_average(), []
    for where, over_ranks in (("one rank", False), ("over ranks", True)):
        for how, forward in make_calls(args.level, over_ranks).items():
            for observer in (None, make_observer()):
                found = spread(quiet(measure(forward, observer, args.calls)))
                rows.append([where, how, "no" if observer is None else "yes", found])
    columns = ["", "", "experts counted", "us of Python a layer"]
    if args.json:
        notes = [f"Batch 1; load average {before:.1f} before."]
        print(json.dumps(describe("Python around a layer", columns, rows, notes), indent=2))
        return
    print(f"load {before:.1f}; us of Python a layer at batch 1, median and least")
    for where, how, is_counted, found in rows:
        times = f"{found['median']:6.2f} {found['min']:6.2f}"
        print(f"{where:>10}  {how:6} experts counted: {is_counted:4} {times}")


def quiet(times: Sequence[float]) -> list[float]:
    """Without the slowest tenth, in which something else ran."""
    return [one for one in times if one <= np.quantile(times, 0.9)] or [median(times)]


if __name__ == "__main__":
    main()
