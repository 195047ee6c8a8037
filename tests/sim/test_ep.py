"""Drawn routing against closed forms and known bands; chunks of an exchange."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moesaic.cost.calibrated import profile_named
from moesaic.cost.exchange import copies_once
from moesaic.cost.ops import Formats
from moesaic.cost.profile import PAPER
from moesaic.errors import ConfigError
from moesaic.placement.pack import placed_slots
from moesaic.planner.sim.chunking import Exchange, study_chunks
from moesaic.planner.sim.ep import EpCase, arrivals, gpu_rows, study_ep
from moesaic.planner.sim.traffic import TopicTraffic, _first_distinct, _race, max_mean, share_variation
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster
from moesaic.spec.locate import locate

EVEN = TopicTraffic.zipf(256, 0.0)


def ratios(traffic: TopicTraffic, tokens: int, trials: int, gpus: int = 32) -> tuple[float, float]:
    """Means over trials of the busiest expert and the busiest GPU of a contiguous placement."""
    rng = np.random.default_rng(0)
    loads = [traffic.counts(rng, np.zeros(tokens, np.int64), 8) for _ in range(trials)]
    return (
        float(np.mean([max_mean(load) for load in loads])),
        float(np.mean([max_mean(load.reshape(gpus, -1).sum(axis=1)) for load in loads])),
    )


def test_balls_in_bins() -> None:
    assert ratios(EVEN, 32, 100) == pytest.approx((4.74, 1.78), rel=0.06)
    assert ratios(EVEN, 32_768, 2) == pytest.approx((1.095, 1.0215), abs=0.012)


def test_zipf_is_less_hot_than_popular_as_a_tokens_experts_are_distinct() -> None:
    traffic = TopicTraffic.zipf(256, 0.6)
    assert max_mean(traffic.popularity_ZE[0]) == pytest.approx(12.17, abs=0.01)
    expert, _ = ratios(traffic, 40_000, 1)
    assert expert == pytest.approx(10.54, rel=0.02)
    gpus = [ratios(TopicTraffic.zipf(256, 0.6, seed=seed), 2048, 1)[1] for seed in range(20)]
    assert np.mean(gpus) == pytest.approx(2.2, abs=0.25)


@pytest.mark.parametrize("exponent", [0.0, 0.9])
def test_both_ways_to_draw_have_the_same_distribution(exponent: float) -> None:
    traffic, topics = TopicTraffic.zipf(16, exponent), np.zeros(20_000, np.int64)
    loads = []
    for draw in (_first_distinct, _race):
        found = draw(np.random.default_rng(1), traffic.popularity_ZE, topics, 4)
        assert (np.diff(np.sort(found, axis=1), axis=1) > 0).all()
        loads.append(np.bincount(found.ravel(), minlength=16) / len(topics))
    assert loads[0] == pytest.approx(loads[1], abs=0.02)


def test_every_expert_of_a_token_is_another_however_skewed() -> None:
    traffic = TopicTraffic.zipf(8, 30.0)
    assert traffic.counts(np.random.default_rng(0), np.zeros(50, np.int64), 8).tolist() == [50] * 8
    with pytest.raises(ConfigError, match="1 to 8 experts, not 9"):
        traffic.draw(np.random.default_rng(0), np.zeros(1, np.int64), 9)


def test_copies_bring_the_busiest_gpu_down_and_chance_takes_some_back() -> None:
    traffic, rng = TopicTraffic.zipf(256, 0.6), np.random.default_rng(3)
    load = traffic.counts(rng, np.zeros(60_000, np.int64), 8)
    slots = placed_slots(load / load.sum(), 128, 128)
    static = np.bincount(slots.rank, weights=slots.share * load[slots.expert], minlength=128)
    assert max_mean(static) == pytest.approx(1.0246, abs=0.015)
    for tokens, expected in ((22_144, 1.069), (11_072, 1.089)):
        batch = traffic.counts(rng, np.zeros(tokens, np.int64), 8)
        rows = gpu_rows(batch, slots, 128)
        assert rows.sum() == batch.sum()
        assert (rows == np.round(rows)).all()
        assert max_mean(rows) == pytest.approx(expected, abs=0.02)


def test_computing_and_receiving_are_two_skews() -> None:
    """Popular pairs on one GPU make it compute two rows for each arrival."""
    slots, rng = placed_slots(np.ones(8), 4, 0), np.random.default_rng(0)
    pairs = np.array([[0, 1]] * 8 + [[2, 4], [3, 6], [5, 2], [7, 4]])
    load = np.bincount(pairs.ravel(), minlength=8)
    assert max_mean(gpu_rows(load, slots, 4)) == pytest.approx(16 / 6)
    received = arrivals(pairs, slots, 4, rng)  # tokens 0 and 4 are at home on GPU 0 already
    assert received[0] == 6
    assert max_mean(received) < 16 / 6


def test_slots_that_do_not_divide_leave_some_ranks_one_less() -> None:
    slots = placed_slots(np.arange(1.0, 8.0), 4, 3)
    assert sorted(np.bincount(slots.rank).tolist()) == [2, 2, 3, 3]
    assert np.bincount(slots.expert, weights=slots.share) == pytest.approx(1.0)


def test_a_synchronous_step_waits_for_its_slowest_gpu() -> None:
    case = EpCase(num_experts=8, experts_per_token=8, num_gpus=4, gpus_per_node=4, tokens_per_gpu=(8,),
                  num_redundant=0, num_trials=1)  # fmt: skip
    even = TopicTraffic.zipf(8, 0.0)
    fast, slow = (study_ep(replace(case, slow=one), even, "even").rows[0] for one in (1.0, 3.0))
    assert fast.placements["contiguous"].utilisation == 1.0
    found = slow.placements["contiguous"]
    assert found.rows.mean == 3.0
    assert found.utilisation == pytest.approx((3 + 1 + 1 + 1) / (4 * 3))
    with pytest.raises(ConfigError, match="slow is a factor of 1"):
        replace(case, slow=0.5)


def test_touched_experts_are_at_most_what_even_ones_give() -> None:
    rng = np.random.default_rng(0)
    skewed = TopicTraffic.zipf(128, 0.8)
    found = [np.count_nonzero(skewed.counts(rng, np.zeros(64, np.int64), 8)) for _ in range(60)]
    assert np.mean(found) == pytest.approx(114.6, abs=0.7)
    assert np.mean(found) < 128 * (1 - (1 - 8 / 128) ** 64)
    even = [np.count_nonzero(EVEN.counts(rng, np.zeros(256, np.int64), 8)) for _ in range(20)]
    assert np.mean(even) == pytest.approx(256 * (1 - (1 - 8 / 256) ** 256), rel=0.005)


def test_decode_is_steadier_than_prefill_of_as_many_tokens() -> None:
    traffic, rng = TopicTraffic.zipf(64, 1.0, num_topics=12), np.random.default_rng(0)
    decode, prefill = (
        share_variation(traffic, rng, num_requests=n, tokens_per_request=t, num_chosen=1, num_batches=20)
        for n, t in ((4000, 1), (4, 1000))
    )
    assert decode == pytest.approx(0.139, abs=0.02)
    assert prefill == pytest.approx(0.571, abs=0.1)


def test_copies_over_the_wire_equal_their_closed_forms() -> None:
    case = EpCase(tokens_per_gpu=(4,), num_trials=2)
    report = study_ep(case, EVEN, "even")
    for one in report.copies.values():
        assert one.copies == pytest.approx(one.closed, rel=0.02)
        assert one.across_nodes == pytest.approx(one.across_nodes_closed, rel=0.03)
    assert report.payload == pytest.approx(copies_once(1, 8, 32, 256) / 31, rel=0.01)
    assert report.payload <= report.payload_most == pytest.approx(8 / 31)
    across = [one.across_nodes for one in report.copies.values()]
    assert across == sorted(across, reverse=True)  # each way sends less than the one before
    assert report == study_ep(case, EVEN, "even")
    assert report != study_ep(EpCase(tokens_per_gpu=(4,), num_trials=2, seed=1), EVEN, "even")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_gpus": 24}, "nearest legal: 16 and 32 GPUs"),
        ({"num_gpus": 512}, "nearest legal: 256 GPUs"),
        ({"num_redundant": 5}, "must divide over 32 GPUs"),
        ({"num_trials": 0}, "trials must be at least 1"),
        ({"experts_per_token": 300}, "more than the 256 experts"),
        ({"tokens_per_gpu": (10**6,)}, "give fewer --tokens"),
        ({"num_gpus": 16, "gpus_per_node": 6, "num_redundant": 0}, "no whole number of nodes"),
    ],
)
def test_impossible_cases_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EpCase(**change)


def exchange(tokens: int, machines: str = "h800x8x4") -> Exchange:
    spec, found = read_config(locate("deepseek-v3").config, name="x"), cluster(machines)
    return Exchange(
        model=spec, cluster=found, tokens=tokens, profile=profile_named("calibrated", found),
        formats=Formats(dispatch_bits=8.25),
    )  # fmt: skip


def test_chunks_overlap_until_latencies_and_weights_cost_more() -> None:
    """Few large chunks hide nothing, many small ones pay for latency and read weights again."""
    report = study_chunks(exchange(4096))
    whole, best, smallest = report.rows[0], report.best, report.rows[-1]
    assert whole.num_chunks == 1
    assert whole.simulated_s == pytest.approx(sum(exchange(4096).seconds(4096.0)))
    assert whole.chunk_tokens > best.chunk_tokens > smallest.chunk_tokens
    assert best.simulated_s < 0.6 * whole.simulated_s
    assert smallest.simulated_s > best.simulated_s
    for row in report.rows:
        assert row.simulated_s == pytest.approx(row.closed_form_s, rel=1e-9)  # powers of two: equal chunks
        assert 0 <= row.exposed_s <= row.simulated_s
    uneven = study_chunks(exchange(100), sizes=[64])
    assert uneven.rows[1].num_chunks == 2
    assert uneven.rows[1].simulated_s != uneven.rows[1].closed_form_s


def test_an_exchange_needs_experts_that_divide() -> None:
    with pytest.raises(ConfigError, match="do not divide over 24 GPUs"):
        exchange(8, "h800x8x3")
    with pytest.raises(ConfigError, match="tokens must be at least 1"):
        exchange(0)
    dense = read_config(locate("llama-3-70b").config, name="x")
    with pytest.raises(ConfigError, match="dense"):
        Exchange(model=dense, cluster=cluster("h800x8"), tokens=1, profile=PAPER, formats=Formats())
