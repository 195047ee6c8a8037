"""Properties of a step's cost: monotone in what is better, additive, the same alone and among others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.cost.layouts import Split, copies_per_token, memory_per_rank, split_of, step_cost
from moesaic.cost.load import CHANCE, EVEN, busiest_distinct, busiest_rows, shares_of, zipf_shares
from moesaic.cost.ops import Formats, Work
from moesaic.cost.profile import PAPER
from moesaic.cost.term import Par, Repeat, Seq, at, leaves, seconds_by_name, step_seconds
from moesaic.errors import ConfigError
from moesaic.spec.deployment import Grid, Layout
from moesaic.spec.experts import ExpertLoad
from moesaic.spec.families import read_config
from moesaic.spec.hardware import Cluster, Fact, cluster
from moesaic.spec.locate import preset
from moesaic.spec.model import MoeSpec

QWEN = read_config(preset("qwen3-30b-a3b").config, name="qwen3-30b-a3b")
V3 = read_config(preset("deepseek-v3").config, name="deepseek-v3")
WORK = Work(num_seqs=32.0, new_tokens=1.0, past=2048.0)


def faster(cards: Cluster, fact: str, factor: float) -> Cluster:
    facts = {**cards.machine.facts, fact: Fact(value=cards.machine.facts[fact].value * factor, source="test")}
    return replace(cards, machine=replace(cards.machine, facts=facts))


def seconds(cards: Cluster, split: Split, work: Work = WORK) -> float:
    return float(step_seconds(step_cost(QWEN, cards, split, work, profile=PAPER)).value)


@pytest.mark.parametrize(
    "split", [Split(tp=8, expert_tp=8), Split(tp=8, ep=8), Split(dp=16, ep=16), Split(tp=2, dp=8, ep=16)]
)
@pytest.mark.parametrize(
    "fact", ["memory_bytes_per_s", "flops_per_s.bfloat16", "link_bytes_per_s", "network_bytes_per_s"]
)
def test_a_better_machine_is_never_slower(split: Split, fact: str) -> None:
    cards = cluster("h100x8x2")
    assert seconds(faster(cards, fact, 2.0), split) <= seconds(cards, split)


def test_the_network_matters_only_across_nodes() -> None:
    cards, better = cluster("h100x8x2"), faster(cluster("h100x8x2"), "network_bytes_per_s", 2.0)
    assert seconds(better, Split(dp=16, ep=16)) < seconds(cards, Split(dp=16, ep=16))
    assert seconds(better, Split(dp=8, ep=8)) == seconds(cards, Split(dp=8, ep=8))


@given(st.floats(1, 256), st.floats(1, 256), st.floats(0, 8192))
def test_more_work_takes_no_less_time(a: float, b: float, past: float) -> None:
    low, high = sorted((a, b))
    one, two = (
        seconds(cluster("h100x8"), Split(dp=8, ep=8), Work(num_seqs=n, new_tokens=1.0, past=past))
        for n in (low, high)
    )
    assert one <= two * (1 + 1e-12)


def test_an_array_of_candidates_costs_what_each_costs_alone() -> None:
    tp, dp, ep = np.array([8.0, 1, 2, 8]), np.array([1.0, 8, 4, 1]), np.array([1.0, 8, 8, 8])
    batch = np.array([64.0, 8, 16, 3])
    cards = cluster("h200x8")
    many = step_cost(
        V3, cards, Split(tp=tp, dp=dp, ep=ep, expert_tp=8 / ep), replace(WORK, num_seqs=batch), profile=PAPER
    )
    for idx in range(4):
        split = Split(tp=tp[idx], dp=dp[idx], ep=ep[idx], expert_tp=8 / ep[idx])
        one = step_cost(V3, cards, split, replace(WORK, num_seqs=batch[idx]), profile=PAPER)
        assert step_seconds(at(many, idx)).value == pytest.approx(float(step_seconds(one).value), rel=1e-12)
        assert at(many, idx) == at(many, idx)


def test_parts_add_up() -> None:
    cost = step_cost(V3, cluster("h200x8"), Split(dp=8, ep=8), WORK, profile=PAPER)
    assert isinstance(cost, Seq)
    total = sum(times * term.seconds.value for times, term in leaves(cost))
    assert float(total) == pytest.approx(float(step_seconds(cost).value))
    assert float(sum(seconds_by_name(cost).values())) == pytest.approx(float(total))


def test_par_takes_the_slowest_and_repeat_multiplies() -> None:
    terms = [
        term for _, term in leaves(step_cost(V3, cluster("h200x8"), Split(dp=8, ep=8), WORK, profile=PAPER))
    ]
    a, b = terms[0], terms[1]
    both = step_seconds(Par((a, b))).value
    assert both == max(a.seconds.value, b.seconds.value)
    assert step_seconds(Repeat(3.0, Seq((a, b)))).value == 3.0 * (a.seconds.value + b.seconds.value)


def test_operations_do_not_depend_on_the_split() -> None:
    """Conservation: what all ranks compute together is what one rank would."""

    def matrices(split: Split, seqs: float) -> float:
        cost = step_cost(
            QWEN, cluster("h100x8"), split, replace(WORK, num_seqs=seqs), profile=PAPER, shares=EVEN
        )
        kinds = ("attention", "experts")
        return sum(float(times * term.flops) for times, term in leaves(cost) if term.name in kinds)

    one = matrices(Split(), 64.0)
    assert 8 * matrices(Split(dp=8, ep=8), 8.0) == pytest.approx(one)


def test_ranks_must_agree() -> None:
    with pytest.raises(ConfigError, match="attention has dp x kvp x tp = 8 ranks, experts have ep x tp = 4"):
        Split(tp=8, ep=4)
    with pytest.raises(ConfigError, match="one or two micro-batches"):
        Split(num_micro_batches=3)


def test_a_layout_of_a_deployment() -> None:
    ranks = tuple(range(8))
    layout = Layout(
        attention=Grid(axes={"dp": 4, "tp": 2}, ranks=ranks), experts=Grid(axes={"ep": 8}, ranks=ranks),
        dispatcher="exchange",
    )  # fmt: skip
    split = split_of(layout, num_redundant=8)
    assert (split.tp, split.dp, split.ep, split.num_redundant) == (2, 4, 8, 8)
    apart = replace(layout, experts=Grid(axes={"ep": 4}, ranks=(8, 9, 10, 11)), dispatcher="remote")
    with pytest.raises(ConfigError, match="are not one step"):
        split_of(apart)


def test_a_machine_without_links_has_one_rank() -> None:
    alone = cluster("epyc-2vcpux2")
    with pytest.raises(
        ConfigError, match="epyc-2vcpu has neither link_bytes_per_s nor host_link_bytes_per_s"
    ):
        step_cost(QWEN, alone, Split(tp=2, expert_tp=2), WORK, profile=PAPER)
    assert seconds(cluster("epyc-2vcpu"), Split()) > 0


def test_copies_per_token() -> None:
    moe = V3.moe_layers[0][1]
    assert float(copies_per_token(moe, 64, PAPER)) * 128 == pytest.approx(1008)
    once = replace(PAPER, sends_once=True)
    assert float(copies_per_token(moe, 64, once)) * 128 == pytest.approx(967, abs=0.5)


def test_memory_of_a_rank() -> None:
    found = memory_per_rank(
        V3, Split(dp=32, ep=32, num_redundant=32), num_seqs=16, context=4096, max_rows=512, profile=PAPER,
        formats=Formats(dispatch_bits=8),
    )  # fmt: skip
    assert float(found["kv"]) == 16 * 4096 * 70272
    assert float(found["replicas"]) == pytest.approx(float(found["experts"]) / 8)
    assert float(found["dispatch_buffers"]) == 512 * 8 * 7168 * 3
    # The latent is on every tensor-parallel rank; heads are not.
    flat = [
        float(
            memory_per_rank(
                V3, Split(tp=tp, expert_tp=tp), num_seqs=1, context=1000, max_rows=0, profile=PAPER
            )["kv"]
        )
        for tp in (1, 8)
    ]
    assert flat[0] == flat[1]
    gqa = [
        float(
            memory_per_rank(
                QWEN, Split(tp=tp, expert_tp=tp), num_seqs=1, context=1000, max_rows=0, profile=PAPER
            )["kv"]
        )
        for tp in (1, 4, 8)
    ]
    assert gqa[0] == 4 * gqa[1] == 4 * gqa[2]  # four KV heads


# -- the slowest rank --------------------------------------------------------------------------------------


def test_busiest_rows_against_a_simulation() -> None:
    rng = np.random.default_rng(1)
    for num_rows, ranks in ((256, 8), (64, 64), (2048, 32)):
        drawn = rng.multinomial(num_rows, np.full(ranks, 1 / ranks), size=400).max(1).mean()
        assert float(busiest_rows(num_rows, ranks, CHANCE, 0, 0)) == pytest.approx(drawn, rel=0.06)


def test_busiest_distinct_against_a_simulation() -> None:
    rng = np.random.default_rng(2)
    for num_tokens in (1, 8, 64):
        found = []
        for _ in range(200):
            hit = np.zeros(128, dtype=bool)
            for _ in range(num_tokens):
                hit[rng.choice(128, 8, replace=False)] = True
            found.append(hit.reshape(8, 16).sum(1).max())
        assert float(busiest_distinct(num_tokens, 8, 128, 8, CHANCE, 0)) == pytest.approx(
            np.mean(found), rel=0.12
        )


def test_skew_makes_the_busiest_rank_slower_and_redundant_experts_cure_it() -> None:
    shares = zipf_shares(256, 0.8)
    even, skewed, cured = (
        float(busiest_rows(1e6, 32, chosen, 0, extra))
        for chosen, extra in ((EVEN, 0), (shares, 0), (shares, 32))
    )
    assert skewed > 1.3 * even
    assert even <= cured < 1.1 * even
    assert float(busiest_distinct(16, 8, 256, 1, shares, 0)) < float(busiest_distinct(16, 8, 256, 1, EVEN, 0))


def load(counts: list[np.ndarray]) -> ExpertLoad:
    return ExpertLoad(
        counts=tuple(counts), phase="decode", num_tokens=1, num_steps=1, since_s=0, until_s=1, plan_version=0,
        source="a.json",
    )  # fmt: skip


def test_a_real_load() -> None:
    num_layers = len(QWEN.moe_layers)
    counts = [np.arange(128) for _ in range(num_layers)]
    shares = shares_of(load(counts), QWEN)
    assert shares.of_layer(3) == pytest.approx(np.arange(128) / np.arange(128).sum())
    hot = step_cost(QWEN, cluster("h100x8"), Split(dp=8, ep=8), WORK, profile=PAPER, shares=shares)
    even = step_cost(QWEN, cluster("h100x8"), Split(dp=8, ep=8), WORK, profile=PAPER, shares=EVEN)
    assert float(seconds_by_name(hot)["dispatch"]) > float(seconds_by_name(even)["dispatch"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c[:-1], "the load a.json has 47 sparse layers, the model has 48"),
        (lambda c: [*c[:-1], np.ones(64)], "has 64 experts in layer 47, the model has 128"),
        (lambda c: [*c[:-1], np.full(128, -1)], "has the count -1 for expert 0 of layer 47"),
        (
            lambda c: [np.where(np.arange(128) == 5, np.nan, 1.0), *c[1:]],
            "has the count nan for expert 5 of layer 0",
        ),
        (lambda c: [np.zeros(128), *c[1:]], "counted nothing in layer 0"),
    ],
)
def test_a_wrong_load_is_refused(change, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shares_of(load(change([np.ones(128) for _ in range(48)])), QWEN)


def test_a_wrong_skew_is_refused() -> None:
    with pytest.raises(ConfigError, match="a skew is an exponent of at least 0"):
        zipf_shares(8, -1.0)


def test_term_names_are_spans() -> None:
    from moesaic.cost.term import TERM_NAMES
    from moesaic.obs.names import LAYER_SPANS

    assert set(TERM_NAMES) == {span.name for span in LAYER_SPANS}
    assert isinstance(QWEN.layers[0].ffn, MoeSpec)
