"""The router against a plain float64 oracle, with forced ties, and with every option of the gate flipped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.experts.contract import Routing
from moesaic.experts.router import Router
from moesaic.kernels.ops import choose
from moesaic.layers.norm import RmsNorm
from moesaic.spec.model import GateSpec, MoeSpec
from moesaic.spec.numerics import preset

OPS = choose(preset("portable", dtype="float32"), num_threads=1)
NUM_EXPERTS, WIDTH, NUM_TOKENS = 32, 48, 65

DEEPSEEK_V3 = GateSpec(
    score="sigmoid",
    has_selection_bias=True,
    num_groups=4,
    groups_per_token=2,
    group_score="top2_sum",
    renormalise_epsilon=1e-20,
    scale=2.5,
)
DEEPSEEK_V2 = GateSpec(score="softmax", is_renormalised=False, scale=16.0, num_groups=8, groups_per_token=3)
GATES = {
    "mixtral": GateSpec(score="softmax"),
    "olmoe": GateSpec(score="softmax", is_renormalised=False),
    "gpt_oss": GateSpec(score="softmax", order="topk_then_score", is_renormalised=False, has_logit_bias=True),
    "llama4": GateSpec(score="sigmoid", order="topk_then_score", is_renormalised=False),
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
}


def moe_spec(gate: GateSpec, num_choices: int = 4, num_experts: int = NUM_EXPERTS) -> MoeSpec:
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=num_choices,
        expert_width=8,
        gate=gate,
        shared=None,
        row_width=WIDTH,
    )


def random_tensors(seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "x_TD": torch.randn(NUM_TOKENS, WIDTH, generator=rng),
        "weight_ED": torch.randn(NUM_EXPERTS, WIDTH, generator=rng) / 4,
        "selection_bias_E": torch.randn(NUM_EXPERTS, generator=rng) / 4,
        "logit_bias_E": torch.randn(NUM_EXPERTS, generator=rng),
        "input_scale_D": 1 + torch.randn(WIDTH, generator=rng) / 4,
        "expert_scale_E": 1 + torch.randn(NUM_EXPERTS, generator=rng) / 4,
    }


def make_router(gate: GateSpec, num_choices: int, tensors: dict[str, Tensor]) -> Router:
    return Router(
        moe_spec(gate, num_choices),
        tensors["weight_ED"],
        tensors["selection_bias_E"] if gate.has_selection_bias else None,
        tensors["logit_bias_E"] if gate.has_logit_bias else None,
        OPS,
        input_norm=RmsNorm(tensors["input_scale_D"], 1e-6, OPS) if gate.has_input_norm else None,
        expert_scale_E=tensors["expert_scale_E"] if gate.has_expert_scale else None,
    )


def oracle(
    logits_TE: np.ndarray, gate: GateSpec, num_choices: int, selection_bias_E: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """(ids, weights) [T, K] in float64, one token and one rule at a time."""

    def score(logits: np.ndarray) -> np.ndarray:
        if gate.score == "sigmoid":
            return 1 / (1 + np.exp(-logits))
        powers = np.exp(logits - logits.max())
        return powers / powers.sum()

    def best(scores: dict[int, float], how_many: int) -> list[int]:
        return sorted(scores, key=lambda i: (-scores[i], i))[:how_many]

    ids, weights = [], []
    for logits_E in logits_TE.astype(np.float64):
        scores_E = score(logits_E) if gate.order == "score_then_topk" else logits_E
        choice_E = scores_E if selection_bias_E is None else scores_E + selection_bias_E
        groups = np.split(choice_E, gate.num_groups)
        group_scores = {
            i: float(group.max() if gate.group_score == "max" else np.sort(group)[-2:].sum())
            for i, group in enumerate(groups)
        }
        size = len(logits_E) // gate.num_groups
        kept = [g * size + i for g in best(group_scores, gate.groups_per_token) for i in range(size)]
        chosen = sorted(best({i: float(choice_E[i]) for i in kept}, num_choices))
        weight_K = scores_E[chosen]
        if gate.order == "topk_then_score":
            weight_K = score(weight_K)
        if gate.is_renormalised:
            total = max(weight_K.sum() + gate.renormalise_epsilon, gate.renormalise_floor)
            weight_K = weight_K / total
        ids.append(chosen)
        weights.append(weight_K * gate.scale)
    return np.array(ids), np.array(weights)


def check_against_oracle(routing: Routing, expected: tuple[np.ndarray, np.ndarray]) -> None:
    assert routing.experts_TK.dtype == torch.int64
    assert routing.weights_TK.dtype == torch.float32
    np.testing.assert_array_equal(routing.experts_TK.numpy(), expected[0])
    np.testing.assert_allclose(routing.weights_TK.numpy(), expected[1], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
@pytest.mark.parametrize("num_choices", [1, 4, 6, 8])
def test_router_equals_the_oracle(gate: GateSpec, num_choices: int) -> None:
    tensors = random_tensors()
    routing = make_router(gate, num_choices, tensors)(tensors["x_TD"])
    logits_TE = (tensors["x_TD"].double() @ tensors["weight_ED"].double().T).numpy()
    if gate.has_logit_bias:
        logits_TE = logits_TE + tensors["logit_bias_E"].double().numpy()
    bias = tensors["selection_bias_E"].double().numpy() if gate.has_selection_bias else None
    check_against_oracle(routing, oracle(logits_TE, gate, num_choices, bias))


def test_a_group_that_lost_is_out_even_where_all_scores_are_negative() -> None:
    tensors = random_tensors()
    tensors["selection_bias_E"] = tensors["selection_bias_E"] - 3.0
    routing = make_router(DEEPSEEK_V3, 8, tensors)(tensors["x_TD"])
    logits_TE = (tensors["x_TD"].double() @ tensors["weight_ED"].double().T).numpy()
    bias_E = tensors["selection_bias_E"].double().numpy()
    check_against_oracle(routing, oracle(logits_TE, DEEPSEEK_V3, 8, bias_E))
    assert (routing.experts_TK // 8).float().var(dim=-1).max() > 0  # more than one group is in play


def test_ids_ascend_and_weights_follow_them() -> None:
    tensors = random_tensors()
    routing = make_router(GATES["mixtral"], 8, tensors)(tensors["x_TD"])
    assert (routing.experts_TK.diff(dim=-1) > 0).all()
    scores_TE = (tensors["x_TD"] @ tensors["weight_ED"].T).softmax(dim=-1)
    scores_TK = scores_TE.gather(-1, routing.experts_TK)
    expected = scores_TK / scores_TK.sum(dim=-1, keepdim=True)
    assert torch.allclose(routing.weights_TK, expected)
    assert not (routing.weights_TK.diff(dim=-1) <= 0).all(dim=-1).any()  # they are not sorted by weight


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
def test_ties_go_to_the_lowest_id(gate: GateSpec) -> None:
    """Logits of three values only: most choices are ties, of experts and of groups."""
    rng = np.random.default_rng(1)
    logits_TE = rng.integers(0, 3, (200, NUM_EXPERTS)).astype(np.float32)
    gate = replace(gate, has_selection_bias=False, has_logit_bias=False)
    router = make_router(gate, 6, random_tensors())
    check_against_oracle(router.route(torch.from_numpy(logits_TE)), oracle(logits_TE, gate, 6, None))


def test_all_equal_chooses_the_first() -> None:
    routing = make_router(GATES["mixtral"], 4, random_tensors()).route(torch.zeros(3, NUM_EXPERTS))
    assert routing.experts_TK.tolist() == [[0, 1, 2, 3]] * 3
    assert routing.weights_TK.tolist() == [[0.25] * 4] * 3


def test_selection_bias_moves_the_choice_and_not_the_weights() -> None:
    tensors = random_tensors()
    gate = GateSpec(score="sigmoid", has_selection_bias=True, is_renormalised=False)
    plain = make_router(replace(gate, has_selection_bias=False), 4, tensors)(tensors["x_TD"])
    favourite = {
        **tensors,
        "selection_bias_E": torch.zeros(NUM_EXPERTS).index_fill(0, torch.tensor(30), 10.0),
    }
    routing = make_router(gate, 4, favourite)(tensors["x_TD"])
    assert (routing.experts_TK == 30).any(dim=-1).all()
    assert not (plain.experts_TK == 30).any(dim=-1).all()
    scores_TE = (tensors["x_TD"] @ tensors["weight_ED"].T).sigmoid()
    assert torch.allclose(routing.weights_TK, scores_TE.gather(-1, routing.experts_TK))


FLIPS: dict[str, dict[str, Any]] = {
    "score": {"score": "softmax"},
    "order": {"order": "topk_then_score"},
    "is_renormalised": {"is_renormalised": False},
    "scale": {"scale": 1.0},
    "has_selection_bias": {"has_selection_bias": False},
    "has_logit_bias": {"has_logit_bias": False},
    "num_groups": {"num_groups": 8},
    "groups_per_token": {"groups_per_token": 3},
    "group_score": {"group_score": "max"},
    "renormalise_epsilon": {"renormalise_epsilon": 0.0},
    "has_input_norm": {"has_input_norm": False},
    "has_expert_scale": {"has_expert_scale": False},
    "renormalise_floor": {"renormalise_floor": 4.5},
}


def test_every_field_of_the_gate_is_flipped_below() -> None:
    assert set(FLIPS) | {"jitter"} == set(GateSpec.__dataclass_fields__), "sparsemixer's jitter has its own"


@pytest.mark.parametrize("flip", FLIPS.values(), ids=FLIPS.keys())
def test_every_option_changes_something(flip: dict[str, Any]) -> None:
    scaled = {"has_input_norm": True, "has_expert_scale": True}
    gate = replace(DEEPSEEK_V3, has_logit_bias=True, renormalise_epsilon=0.25, **scaled)
    tensors = random_tensors()
    before = make_router(gate, 4, tensors)(tensors["x_TD"])
    after = make_router(replace(gate, **flip), 4, tensors)(tensors["x_TD"])
    has_moved = (before.experts_TK != after.experts_TK).any()
    assert has_moved or not torch.allclose(before.weights_TK, after.weights_TK, rtol=1e-3)


SPARSEMIXER = GateSpec(score="sparsemixer", is_renormalised=False, jitter=0.2)


def sparsemixer_oracle(logits_E: np.ndarray, jitter: float) -> dict[int, float]:
    """The weights of the two chosen, in float64, one expert after the other."""
    found: dict[int, float] = {}
    for _ in range(2):
        best = max((float(x), -i) for i, x in enumerate(logits_E) if i not in found)
        near = {
            i: float(x)
            for i, x in enumerate(logits_E)
            if i not in found and (best[0] - x) / max(abs(x), best[0]) <= 2 * jitter
        }
        found[-best[1]] = 1 / sum(np.exp(x - best[0]) for x in near.values())
    return dict(sorted(found.items()))


@pytest.mark.parametrize("shift", [0.0, -20.0])
def test_sparsemixer_equals_the_oracle(shift: float) -> None:
    tensors = random_tensors()
    router = make_router(SPARSEMIXER, 2, tensors)
    logits_TE = OPS.linear_float32(tensors["x_TD"], tensors["weight_ED"]) + shift
    rows = [sparsemixer_oracle(logits_E, 0.2) for logits_E in logits_TE.double().numpy()]
    expected = np.array([list(row) for row in rows]), np.array([list(row.values()) for row in rows])
    check_against_oracle(router.route(logits_TE), expected)
    assert (expected[1] < 1).any()
    sharper = make_router(replace(SPARSEMIXER, jitter=0.1), 2, tensors).route(logits_TE)
    assert not torch.equal(sharper.weights_TK, router.route(logits_TE).weights_TK)


def test_sparsemixer_on_equals_on_rows_that_are_not_finite_and_on_none() -> None:
    router = make_router(SPARSEMIXER, 2, random_tensors())
    inf, nan = float("inf"), float("nan")
    rows = [[0.0] * 32, [-1.0] * 32, [nan] * 32, [inf] * 32, [-inf] * 32, [inf] + [-inf] * 31]
    routing = router.route(torch.tensor(rows))
    assert routing.experts_TK[0].tolist() == routing.experts_TK[1].tolist() == [0, 1]
    assert torch.allclose(routing.weights_TK[0], torch.tensor([1 / 32, 1 / 31]))
    assert (routing.experts_TK.diff(dim=-1) > 0).all()
    assert int(routing.experts_TK.max()) < NUM_EXPERTS
    assert router.route(torch.zeros(0, NUM_EXPERTS)).experts_TK.shape == (0, 2)


def test_sparsemixer_routes_a_token_alone_as_in_a_batch_and_takes_two() -> None:
    tensors = random_tensors()
    router = make_router(SPARSEMIXER, 2, tensors)
    whole = router(tensors["x_TD"])
    for t in range(0, NUM_TOKENS, 7):
        alone = router(tensors["x_TD"][t : t + 1])
        assert torch.equal(alone.experts_TK[0], whole.experts_TK[t])
        assert torch.equal(alone.weights_TK[0], whole.weights_TK[t])
    with pytest.raises(ConfigError, match="sparsemixer chooses 2 experts, and experts_per_token is 3"):
        make_router(SPARSEMIXER, 3, tensors)


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
def test_a_token_is_routed_alone_as_in_a_batch(gate: GateSpec) -> None:
    tensors = random_tensors()
    router = make_router(gate, 6, tensors)
    whole = router(tensors["x_TD"])
    for t in range(0, NUM_TOKENS, 7):
        alone = router(tensors["x_TD"][t : t + 1])
        assert torch.equal(alone.experts_TK[0], whole.experts_TK[t])
        assert torch.equal(alone.weights_TK[0], whole.weights_TK[t])


def test_float32_whatever_the_rows_are() -> None:
    """A bfloat16 row and weight are widened, not multiplied in bfloat16."""
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors().items()}
    routing = make_router(GATES["mixtral"], 4, tensors)(tensors["x_TD"])
    logits_TE = (tensors["x_TD"].double() @ tensors["weight_ED"].double().T).numpy()
    check_against_oracle(routing, oracle(logits_TE, GATES["mixtral"], 4, None))


def test_no_tokens() -> None:
    tensors = random_tensors()
    for gate in GATES.values():
        routing = make_router(gate, 4, tensors)(tensors["x_TD"][:0])
        assert routing.experts_TK.shape == routing.weights_TK.shape == (0, 4)


def test_gemmas_gate_norms_its_rows_and_scales_its_weights() -> None:
    gate = GateSpec(score="softmax", has_input_norm=True, has_expert_scale=True)
    tensors = random_tensors()
    x_TD = tensors["x_TD"].double()
    normed = x_TD / (x_TD.square().mean(-1, keepdim=True) + 1e-6).sqrt() * tensors["input_scale_D"]
    scores = (normed @ tensors["weight_ED"].double().T).softmax(-1)
    routing = make_router(gate, 4, tensors)(tensors["x_TD"])
    chosen = scores.gather(-1, routing.experts_TK)
    expected = chosen / chosen.sum(-1, keepdim=True) * tensors["expert_scale_E"][routing.experts_TK]
    assert torch.equal(routing.experts_TK, scores.topk(4).indices.sort().values)
    torch.testing.assert_close(routing.weights_TK, expected.float())


def test_an_input_norm_that_the_gate_does_not_announce_is_refused() -> None:
    with pytest.raises(ConfigError, match="has a norm of its input, and none was given"):
        Router(
            moe_spec(GateSpec(score="softmax", has_input_norm=True), 2),
            random_tensors()["weight_ED"],
            None,
            None,
            OPS,
        )


def test_every_expert_chosen() -> None:
    tensors = random_tensors()
    routing = make_router(GATES["mixtral"], NUM_EXPERTS, tensors)(tensors["x_TD"])
    assert torch.equal(routing.experts_TK, torch.arange(NUM_EXPERTS).expand(NUM_TOKENS, -1))


def test_rows_that_are_not_finite_keep_valid_ids() -> None:
    """One bad request must not send a row to an expert that does not exist."""
    tensors = random_tensors()
    x_TD = tensors["x_TD"].clone()
    x_TD[3] = float("nan")
    x_TD[5] = float("inf")
    for gate in GATES.values():
        routing = make_router(gate, 4, tensors)(x_TD)
        assert (routing.experts_TK.diff(dim=-1) > 0).all()
        assert int(routing.experts_TK.min()) >= 0
        assert int(routing.experts_TK.max()) < NUM_EXPERTS


@pytest.mark.parametrize(
    ("num_choices", "num_experts", "changes", "message"),
    [
        (9, 8, {}, "experts_per_token must be in 1 to num_experts: got 9 of 8"),
        (0, 8, {}, "got 0 of 8"),
        (2, 10, {"num_groups": 4}, "num_groups must divide num_experts: 10 experts in 4 groups leave 2 over"),
        (
            2,
            8,
            {"num_groups": 4, "groups_per_token": 5},
            "groups_per_token must be in 1 to num_groups: got 5 of 4",
        ),
        (
            5,
            16,
            {"num_groups": 8, "groups_per_token": 2},
            "2 groups of 16 / 8 = 2 experts leave 4 to choose from, fewer than experts_per_token = 5",
        ),
        (
            2,
            8,
            {"num_groups": 8, "groups_per_token": 4, "group_score": "top2_sum"},
            "group_score top2_sum needs two experts in a group: 8 / 8 = 1",
        ),
    ],
)
def test_impossible_gates_are_refused_with_the_arithmetic(
    num_choices: int, num_experts: int, changes: dict[str, Any], message: str
) -> None:
    gate = GateSpec(score="softmax", **changes)
    with pytest.raises(ConfigError) as error:
        Router(moe_spec(gate, num_choices, num_experts), torch.zeros(num_experts, WIDTH), None, None, OPS)
    assert message in str(error.value)


def test_tensors_that_do_not_fit_the_gate_are_refused() -> None:
    tensors = random_tensors()
    plain, biased = moe_spec(GATES["mixtral"]), moe_spec(DEEPSEEK_V3)
    with pytest.raises(ConfigError, match=r"router weight: expected shape \[32, 48\], got \[31, 48\]"):
        Router(plain, tensors["weight_ED"][:31], None, None, OPS)
    with pytest.raises(
        ConfigError, match="selection bias: the gate's spec has such tensor, and none was given"
    ):
        Router(biased, tensors["weight_ED"], None, None, OPS)
    with pytest.raises(
        ConfigError, match="logit bias: the gate's spec has no such tensor, and one was given"
    ):
        Router(plain, tensors["weight_ED"], None, tensors["logit_bias_E"], OPS)
