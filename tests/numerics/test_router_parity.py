"""Our router beside the router modules of transformers, on random weights in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moesaic.experts.router import Router
from moesaic.kernels.ops import choose
from moesaic.spec.model import GateSpec, MoeSpec
from moesaic.spec.numerics import preset

transformers = pytest.importorskip("transformers")

NUM_EXPERTS, WIDTH, NUM_TOKENS, NUM_CHOICES = 32, 64, 200, 6


@dataclass(frozen=True, kw_only=True)
class Case:
    gate: GateSpec
    module: Callable[[], torch.nn.Module]
    selection_bias: str | None = None  # name of the module's tensor
    logit_bias: str | None = None
    num_choices: int = NUM_CHOICES


def deepseek_v3(num_groups: int, groups_per_token: int, is_renormalised: bool) -> torch.nn.Module:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as family

    config = family.DeepseekV3Config(
        hidden_size=WIDTH,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_CHOICES,
        n_group=num_groups,
        topk_group=groups_per_token,
        norm_topk_prob=is_renormalised,
        routed_scaling_factor=2.5,
    )
    return family.DeepseekV3TopkRouter(config)


def deepseek_v2(method: str) -> torch.nn.Module:
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as family

    config = family.DeepseekV2Config(
        hidden_size=WIDTH,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_CHOICES,
        topk_method=method,
        n_group=8,
        topk_group=3,
        routed_scaling_factor=16.0,
    )
    return family.DeepseekV2TopkRouter(config)


def qwen3_moe(is_renormalised: bool) -> torch.nn.Module:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as family

    config = family.Qwen3MoeConfig(
        hidden_size=WIDTH,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_CHOICES,
        norm_topk_prob=is_renormalised,
    )
    return family.Qwen3MoeTopKRouter(config)


def olmoe() -> torch.nn.Module:
    from transformers.models.olmoe import modeling_olmoe as family

    config = family.OlmoeConfig(hidden_size=WIDTH, num_experts=NUM_EXPERTS, num_experts_per_tok=NUM_CHOICES)
    return family.OlmoeTopKRouter(config)


def mixtral() -> torch.nn.Module:
    from transformers.models.mixtral import modeling_mixtral as family

    config = family.MixtralConfig(
        hidden_size=WIDTH, num_local_experts=NUM_EXPERTS, num_experts_per_tok=NUM_CHOICES
    )
    return family.MixtralTopKRouter(config)


def gpt_oss() -> torch.nn.Module:
    from transformers.models.gpt_oss import modeling_gpt_oss as family

    config = family.GptOssConfig(
        hidden_size=WIDTH, num_local_experts=NUM_EXPERTS, num_experts_per_tok=NUM_CHOICES
    )
    return family.GptOssTopKRouter(config)


def minimax_m2() -> torch.nn.Module:
    """Its bias stands beside the router, which takes it as an argument."""
    from transformers.models.minimax_m2 import modeling_minimax_m2 as family

    config = family.MiniMaxM2Config(
        hidden_size=WIDTH, num_local_experts=NUM_EXPERTS, num_experts_per_tok=NUM_CHOICES
    )
    return BiasBeside(family.MiniMaxM2TopKRouter(config))


def ernie() -> torch.nn.Module:
    """Its bias is one row."""
    from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as family

    config = family.Ernie4_5_MoeConfig(
        hidden_size=WIDTH, moe_num_experts=NUM_EXPERTS, moe_k=NUM_CHOICES, moe_norm_min=0.6
    )
    router = family.Ernie4_5_MoeTopKRouter(config)
    router.bias = router.moe_statics.e_score_correction_bias[0]
    return router


def granite() -> torch.nn.Module:
    from transformers.models.granitemoe import modeling_granitemoe as family

    config = family.GraniteMoeConfig(
        hidden_size=WIDTH, num_local_experts=NUM_EXPERTS, num_experts_per_tok=NUM_CHOICES
    )
    return family.GraniteMoeTopKRouter(config)


def phimoe(jitter: float) -> torch.nn.Module:
    from transformers.models.phimoe import modeling_phimoe as family

    config = family.PhimoeConfig(hidden_size=WIDTH, num_local_experts=NUM_EXPERTS, router_jitter_noise=jitter)
    return family.PhimoeTopKRouter(config).eval()


class BiasBeside(torch.nn.Module):
    """A router that is called with its selection bias."""

    def __init__(self, router: torch.nn.Module) -> None:
        super().__init__()
        self.router = router
        self.bias = torch.zeros(NUM_EXPERTS)

    @property
    def weight(self) -> Tensor:
        return self.router.weight

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = self.router(x_TD, self.bias)
        return found


class Llama4Weights(torch.nn.Module):
    """Llama 4's router gives a score to every expert, zero to those not chosen."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.llama4 import modeling_llama4 as family

        config = family.Llama4TextConfig(
            hidden_size=WIDTH, num_local_experts=NUM_EXPERTS, num_experts_per_tok=1
        )
        self.router = family.Llama4Router(config)

    @property
    def weight(self) -> Tensor:
        return self.router.weight

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores_TE, logits_TE = self.router(x_TD)
        top = scores_TE.max(dim=-1, keepdim=True)
        return logits_TE, top.values, top.indices


V3 = GateSpec(
    score="sigmoid",
    has_selection_bias=True,
    scale=2.5,
    num_groups=4,
    groups_per_token=2,
    group_score="top2_sum",
    renormalise_epsilon=1e-20,
)
SOFTMAX = GateSpec(score="softmax")
SPARSEMIXER = GateSpec(score="sparsemixer", is_renormalised=False)
CASES = {
    "deepseek_v3": Case(
        gate=V3, module=lambda: deepseek_v3(4, 2, True), selection_bias="e_score_correction_bias"
    ),
    "deepseek_v3 without groups, weights as they are": Case(
        gate=replace(V3, num_groups=1, groups_per_token=1, is_renormalised=False),
        module=lambda: deepseek_v3(1, 1, False),
        selection_bias="e_score_correction_bias",
    ),
    "deepseek_v2 in groups": Case(
        gate=GateSpec(score="softmax", is_renormalised=False, scale=16.0, num_groups=8, groups_per_token=3),
        module=lambda: deepseek_v2("group_limited_greedy"),
    ),
    "deepseek_v2 greedy": Case(
        gate=GateSpec(score="softmax", is_renormalised=False, scale=16.0),
        module=lambda: deepseek_v2("greedy"),
    ),
    "qwen3_moe": Case(gate=SOFTMAX, module=lambda: qwen3_moe(True)),
    "qwen3_moe, weights as they are": Case(
        gate=replace(SOFTMAX, is_renormalised=False), module=lambda: qwen3_moe(False)
    ),
    "olmoe": Case(gate=replace(SOFTMAX, is_renormalised=False), module=olmoe),
    "mixtral": Case(gate=SOFTMAX, module=mixtral),
    "gpt_oss": Case(
        gate=GateSpec(score="softmax", order="topk_then_score", is_renormalised=False, has_logit_bias=True),
        module=gpt_oss,
        logit_bias="bias",
    ),
    "minimax_m2": Case(
        gate=GateSpec(score="sigmoid", has_selection_bias=True), module=minimax_m2, selection_bias="bias"
    ),
    "ernie4_5_moe, the sum of weights at its floor for some": Case(
        gate=replace(SOFTMAX, has_selection_bias=True, renormalise_floor=0.6),
        module=ernie,
        selection_bias="bias",
    ),
    "granitemoe": Case(gate=replace(SOFTMAX, order="topk_then_score", is_renormalised=False), module=granite),
    "phimoe": Case(gate=replace(SPARSEMIXER, jitter=0.01), module=lambda: phimoe(0.01), num_choices=2),
    "phimoe, much jitter": Case(
        gate=replace(SPARSEMIXER, jitter=0.4), module=lambda: phimoe(0.4), num_choices=2
    ),
    "llama4": Case(
        gate=GateSpec(score="sigmoid", order="topk_then_score", is_renormalised=False),
        module=Llama4Weights,
        num_choices=1,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@torch.no_grad()
def test_router_chooses_and_weighs_like_transformers(case: Case) -> None:
    rng = torch.Generator().manual_seed(7)
    module = case.module()
    x_TD = torch.randn(NUM_TOKENS, WIDTH, generator=rng)
    module.weight.copy_(torch.randn(NUM_EXPERTS, WIDTH, generator=rng) / 4)
    biases: list[Tensor | None] = []
    for name in (case.selection_bias, case.logit_bias):
        if name is not None:
            getattr(module, name).copy_(torch.randn(NUM_EXPERTS, generator=rng) / 4)
        biases.append(None if name is None else getattr(module, name))
    _, weights_TK, experts_TK = module(x_TD)
    experts_TK, order_TK = experts_TK.sort(dim=-1)

    spec = MoeSpec(
        num_experts=NUM_EXPERTS,
        experts_per_token=case.num_choices,
        expert_width=8,
        gate=case.gate,
        shared=None,
        row_width=WIDTH,
    )
    ops = choose(preset("portable", dtype="float32"), num_threads=1)
    routing = Router(spec, module.weight, *biases, ops)(x_TD)
    assert torch.equal(routing.experts_TK, experts_TK)
    assert torch.allclose(routing.weights_TK, weights_TK.gather(-1, order_TK), rtol=5e-6, atol=1e-7)
