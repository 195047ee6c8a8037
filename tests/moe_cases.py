"""Routed experts of one layer with random weights, over the ops one by one and in one native call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.experts.blob import BlobLayout
from moesaic.experts.contract import Routing, Tag
from moesaic.experts.ffn import LoopFfn
from moesaic.experts.store import ExpertLoader, ResidentStore
from moesaic.kernels.native.ops import NativeOps
from moesaic.kernels.ops import choose
from moesaic.parallel.dispatch.fused import Fused
from moesaic.parallel.dispatch.local import Local
from moesaic.parallel.dispatch.staged import Staged
from moesaic.parallel.meter import Meter
from moesaic.spec.experts import ExpertPlan
from moesaic.spec.model import GateSpec, MoeSpec
from moesaic.spec.numerics import DType, Format, FormatMap, FormatPair, Numerics, preset
from moesaic.steps import drive

LAYER = 3
TAG = Tag(epoch=0, plan_version=0, step_id=1, micro_batch=0, chunk=0, layer_idx=LAYER)


def moe_spec(
    num_experts: int = 8, num_choices: int = 3, width: int = 64, inner: int = 32, **kinds: object
) -> MoeSpec:
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=num_choices,
        expert_width=inner,
        row_width=width,
        gate=GateSpec(score="softmax"),
        shared=None,
        **kinds,  # type: ignore[arg-type]
    )


def numerics_of(
    level: str,
    dtype: DType,
    formats: Format | Mapping[int, Format],
    *,
    shards: int = 1,
) -> Numerics:
    """`formats` is that of all experts, or by expert where one differs from `dtype`."""
    numerics = preset("portable", dtype=dtype, backend=f"native/{level}").with_leaves(matmul_shards=shards)
    if isinstance(formats, str):
        formats = dict.fromkeys(range(256), formats)
    by_expert = {(LAYER, expert): FormatPair.of(one) for expert, one in formats.items()}
    return Numerics(
        **{name: getattr(numerics, name) for name in Numerics.__slots__ if name != "formats"},
        formats=FormatMap(default=FormatPair.of(dtype), by_expert=by_expert),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Case:
    spec: MoeSpec
    ops: NativeOps
    store: ResidentStore
    plan: ExpertPlan | None

    def staged(self) -> Staged:
        local = Local(((LAYER, self.spec),), self.ops.numerics, self.plan)
        return Staged(tokens=local, experts=local, ffn=LoopFfn(self.spec, self.store, self.ops))

    def fused(self, meter: Meter | None = None) -> Fused:
        return Fused(LAYER, self.spec, self.store, self.ops, meter)


def make_case(
    spec: MoeSpec, numerics: Numerics, *, num_threads: int = 1, plan: ExpertPlan | None = None, seed: int = 0
) -> Case:
    rng = torch.Generator().manual_seed(seed)
    loader = ExpertLoader(((LAYER, spec),), numerics.formats, plan=plan)
    for part, place in BlobLayout.of(spec, "float32").places.items():
        for expert in range(spec.num_experts):
            tensor = torch.randn(place.shape, generator=rng) * 2.0 * place.shape[-1] ** -0.5
            loader.put(LAYER, expert, part, tensor)
    ops = choose(numerics, num_threads=num_threads)
    assert isinstance(ops, NativeOps)
    return Case(spec=spec, ops=ops, store=loader.finish(), plan=plan)


def make_inputs(spec: MoeSpec, dtype: DType, num_tokens: int, seed: int = 0) -> tuple[Tensor, Routing]:
    rng = torch.Generator().manual_seed(seed)
    scores_TE = torch.rand((num_tokens, spec.num_experts), generator=rng)
    # Some experts are chosen by most tokens and some by none.
    scores_TE += torch.linspace(0.6, 0.0, spec.num_experts)
    top = scores_TE.topk(spec.experts_per_token, dim=-1)
    experts_TK = top.indices.sort(dim=-1).values
    x_TD = torch.randn((num_tokens, spec.row_width), generator=rng).to(getattr(torch, dtype))
    weights_TK = torch.rand(experts_TK.shape, generator=rng)
    return x_TD, Routing(experts_TK=experts_TK, weights_TK=weights_TK)


def run(routed: Staged | Fused, x_TD: Tensor, routing: Routing) -> Tensor:
    return drive([routed.forward(x_TD, routing, TAG, None)], 1.0)[0]
