"""The feed-forward of experts against the formula, and what it costs in rows and calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from moesaic.experts.contract import ExpertBatch, Tag, Wave
from moesaic.experts.ffn import GROUP_ROWS, LoopFfn
from moesaic.experts.store import ExpertLoader, ResidentStore
from moesaic.kernels.formats import pack
from moesaic.kernels.ops import Ops, backends, choose
from moesaic.spec.model import Activation, GateSpec, MoeSpec
from moesaic.spec.numerics import DType, Format, FormatMap, FormatPair, preset
from moesaic.steps import drive

WIDTH, INNER = 24, 10
TAG = Tag(epoch=0, plan_version=0, step_id=0, micro_batch=0, chunk=0, layer_idx=2)


def moe_spec(num_experts: int, **options: Any) -> MoeSpec:
    defaults: dict[str, Any] = {
        "num_experts": num_experts,
        "experts_per_token": 2,
        "expert_width": INNER,
        "gate": GateSpec(score="softmax"),
        "shared": None,
        "row_width": WIDTH,
    }
    return MoeSpec(**(defaults | options))


def make_ops(dtype: DType = "float32") -> Ops:
    return choose(preset("portable", dtype=dtype), num_threads=1)


def make_experts(
    spec: MoeSpec, ops: Ops, formats: FormatMap | None = None
) -> tuple[LoopFfn, dict[str, Tensor]]:
    """The feed-forward, and its weights as [E, ...] in float32."""
    rng = torch.Generator().manual_seed(0)
    loader = ExpertLoader(((2, spec),), formats or ops.numerics.formats)
    weights: dict[str, Tensor] = {}
    for part, shape in loader.shapes(2).items():
        weights[part] = torch.randn(spec.num_experts, *shape, generator=rng) * shape[-1] ** -0.5
        loader.put_stack(2, part, weights[part])
    return LoopFfn(spec, loader.finish(), ops), weights


def make_batch(jobs_per_slot: list[int], dtype: DType = "float32", num_rows: int = 40) -> ExpertBatch:
    rng = torch.Generator().manual_seed(1)
    x_RD = torch.randn(num_rows, WIDTH, generator=rng)
    row_J = torch.cat(
        [torch.randperm(num_rows, generator=rng)[:jobs].sort().values for jobs in jobs_per_slot]
    )
    return ExpertBatch(
        tag=TAG,
        x_RD=pack(x_RD, dtype),
        row_J=row_J,
        offsets_L1=F.pad(torch.tensor(jobs_per_slot).cumsum(0), (1, 0)),
        weight_J=torch.rand(len(row_J), generator=rng),
        num_jobs=len(row_J),
        hint_L=None,
    )


def run(ffn: LoopFfn, batch: ExpertBatch) -> Tensor:
    return drive([ffn(batch)], timeout_s=1.0)[0]


ACTIVATIONS = {
    "silu": lambda gate: gate * torch.sigmoid(gate),
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    "relu2": lambda gate: gate.relu() ** 2,
}


def formula(batch: ExpertBatch, spec: MoeSpec, weights: dict[str, Tensor]) -> Tensor:
    """One job at a time, in float64."""
    x_RD = batch.x_RD.unpack(torch.float64)
    out = []
    for slot in range(spec.num_experts):
        of = {part: tensor[slot].double() for part, tensor in weights.items()}
        for job in range(int(batch.offsets_L1[slot]), int(batch.offsets_L1[slot + 1])):
            x = x_RD[batch.row_J[job]]
            if spec.weight_on == "input":
                x = x * batch.weight_J[job].double()
            up = of["up"] @ x + of.get("up_bias", 0.0)
            if spec.is_gated:
                hidden = ACTIVATIONS[spec.activation](of["gate"] @ x + of.get("gate_bias", 0.0)) * up
            else:
                hidden = ACTIVATIONS[spec.activation](up)
            out.append(of["down"] @ hidden + of.get("down_bias", 0.0))
    return torch.stack(out)


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
def test_experts_equal_the_formula(
    is_gated: bool, has_bias: bool, weight_on: Literal["output", "input"], activation: Activation
) -> None:
    spec = moe_spec(5, is_gated=is_gated, has_bias=has_bias, weight_on=weight_on, activation=activation)
    ffn, weights = make_experts(spec, make_ops())
    batch = make_batch([3, 1, 0, 17, 2])
    assert torch.allclose(run(ffn, batch).double(), formula(batch, spec, weights), rtol=2e-5, atol=2e-5)


def test_bfloat16_is_close_and_rounded() -> None:
    spec = moe_spec(3, has_bias=True)
    ffn, weights = make_experts(spec, make_ops("bfloat16"))
    batch = make_batch([5, 9, 1], "bfloat16")
    out_JD = run(ffn, batch)
    assert out_JD.dtype == torch.bfloat16
    weights = {part: tensor.bfloat16() for part, tensor in weights.items()}
    assert torch.allclose(out_JD.double(), formula(batch, spec, weights), rtol=0.03, atol=0.03)


def test_no_jobs_and_no_rows() -> None:
    spec = moe_spec(4, has_bias=True)
    ffn, _ = make_experts(spec, make_ops())
    assert run(ffn, make_batch([0, 0, 0, 0])).shape == (0, WIDTH)
    assert run(ffn, make_batch([0, 0, 0, 0], num_rows=0)).shape == (0, WIDTH)


def test_a_job_has_its_bits_whatever_stands_beside_it() -> None:
    """Jobs of one expert alone, and among experts that share its gather and activation."""
    spec = moe_spec(6, has_bias=True)
    for dtype in ("float32", "bfloat16"):
        ffn, _ = make_experts(spec, make_ops(dtype))
        batch = make_batch([3, 1, 0, 17, 2, 40], dtype)
        whole = run(ffn, batch)
        for slot in range(6):
            jobs = slice(int(batch.offsets_L1[slot]), int(batch.offsets_L1[slot + 1]))
            for job in range(jobs.start, jobs.stop):
                one = replace(
                    batch,
                    row_J=batch.row_J[job : job + 1],
                    weight_J=batch.weight_J[job : job + 1],
                    offsets_L1=(torch.arange(7) > slot).long(),
                    num_jobs=1,
                )
                assert torch.equal(run(ffn, one)[0], whole[job])


def test_one_expert_may_have_another_format() -> None:
    """A format belongs to the logical expert: its jobs change, no others do."""
    ops, spec = make_ops("bfloat16"), moe_spec(4)
    wide = FormatPair(weight="float32", activation="float32")
    plain, _ = make_experts(spec, ops)
    mixed, _ = make_experts(spec, ops, replace(ops.numerics.formats, by_expert={(2, 1): wide}))
    batch = make_batch([4, 6, 3, 2], "bfloat16")
    before, after = run(plain, batch), run(mixed, batch)
    has_changed = (before != after).any(dim=-1)
    assert has_changed[4:10].any()
    assert not has_changed[:4].any()
    assert not has_changed[10:].any()


@pytest.mark.parametrize("format", ["int8", "int4-g32-zp"])
def test_integer_experts_are_near_the_floats_alike_on_every_backend(format: Format) -> None:
    # An activation without transcendental functions: theirs differ between torch and the native kernels.
    spec, batch = moe_spec(4, has_bias=True, activation="relu"), make_batch([4, 0, 3, 2])
    exact = run(make_experts(spec, make_ops())[0], batch)
    found = []
    for backend in backends():
        ops = choose(preset("portable", dtype="float32", backend=backend, format=format), num_threads=1)
        found.append(run(make_experts(spec, ops)[0], batch))
    assert all(torch.equal(one, found[0]) for one in found)
    assert 1e-4 < float((found[0] - exact).norm() / exact.norm()) < (0.03 if format == "int8" else 0.2)


class LateStore(ResidentStore):
    """Some experts come late and in another order, as from a slower tier."""

    def __init__(self, store: ResidentStore, waves: list[tuple[int, ...]]) -> None:
        self._store = store
        self._waves = waves

    def waves(self, layer_idx: int, offsets_L1: Tensor) -> Iterator[Wave]:
        (whole,) = self._store.waves(layer_idx, offsets_L1)
        for slots in self._waves:
            yield replace(whole, slots=slots, ready=Late())


class Late:
    is_here = False

    def ready(self) -> bool:
        return self.is_here

    def wait(self, timeout_s: float) -> None:
        self.is_here = True


def test_waves_may_come_late_and_in_any_order() -> None:
    spec, ops = moe_spec(6), make_ops()
    ffn, _ = make_experts(spec, ops)
    batch = make_batch([3, 1, 0, 17, 2, 40])
    late = LoopFfn(spec, LateStore(ffn._store, [(4, 3), (5, 0, 1)]), ops)  # type: ignore[arg-type]
    steps = late(batch)
    waits = [next(steps)]
    waits[0].wait(1.0)
    waits.append(next(steps))
    assert waits[0] is not waits[1]  # one wait per wave
    assert torch.equal(run(late, batch), run(ffn, batch))


class WatchedOps:
    """The ops, and the rows and calls that they saw."""

    def __init__(self, ops: Ops) -> None:
        self.numerics = ops.numerics
        self.most_rows = 0
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        def call(x: Tensor, *args: Any) -> Tensor:
            self.most_rows = max(self.most_rows, x.shape[0])
            result: Tensor = getattr(self._ops, name)(x, *args)
            return result

        return call


@pytest.mark.parametrize(
    ("jobs_per_slot", "most_rows"),
    [
        ([900, 300, 0, 10, 400, 50], 900),  # the busiest expert's, though there are 1660 jobs
        ([60] * 6, 240),  # experts with few jobs share a group, up to GROUP_ROWS
        ([GROUP_ROWS + 44] * 6, GROUP_ROWS + 44),
    ],
)
def test_rows_alive_are_those_of_the_busiest_expert(jobs_per_slot: list[int], most_rows: int) -> None:
    """Not T * K rows: what a gather of all choices at once would hold."""
    ops = WatchedOps(make_ops())
    spec = moe_spec(6)
    ffn, _ = make_experts(spec, ops)  # type: ignore[arg-type]
    batch = make_batch(jobs_per_slot, num_rows=1000)
    run(ffn, batch)
    assert ops.most_rows == most_rows < sum(jobs_per_slot)


class PlainOps:
    """Each op one torch call: what is left is the feed-forward's own."""

    def __init__(self, ops: Ops) -> None:
        self.numerics = ops.numerics

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    linear_inner = linear

    def activation(self, gate: Tensor, up: Tensor | None, kind: Activation) -> Tensor:
        return F.silu(gate)


class CallCount(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def test_a_decode_step_makes_few_calls_per_expert() -> None:
    """Sixteen tokens of eight choices touch most of 64 experts, with a row or two each."""
    spec = moe_spec(64, has_bias=True)
    ffn, _ = make_experts(spec, PlainOps(make_ops()))  # type: ignore[arg-type]
    batch = make_batch([2, 3, 1, 2] * 14 + [0] * 8)
    with torch.inference_mode(), CallCount() as count:
        run(ffn, batch)
    assert count.num_calls <= 6 * 56
