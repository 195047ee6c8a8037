"""Counts of rows that travel, against the lecture notes' figures and against drawn tokens."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from moesaic.cost.exchange import (
    REPORTED_LAUNCHES,
    copies_once,
    copies_over_nodes,
    copies_sent,
    crossing_share,
    expert_by_tensor_bytes,
    hidden_share,
    launch_seconds,
    payload_share,
    returned_bytes,
)
from moesaic.cost.layouts import copies_per_token
from moesaic.cost.profile import PAPER
from moesaic.planner.sim.traffic import TopicTraffic
from moesaic.spec.families import read_config
from moesaic.spec.locate import preset

V3 = read_config(preset("deepseek-v3").config, name="deepseek-v3").moe_layers[0][1]


def test_copies_of_a_batch() -> None:
    assert copies_sent(128, 8, 64) == 1008
    assert copies_once(128, 8, 64, 256) == pytest.approx(967.145, rel=1e-5)
    # Halves over twice the devices: as likely to have one, and the other half of each group is one more.
    assert copies_once(128, 8, 128, 256, 2) == pytest.approx(967.145 * 127 / 63, rel=1e-5)
    assert copies_sent(1, 2, 4, 2) == pytest.approx(3.0)
    assert returned_bytes(1, 2, 4, 10, result_bytes=2) == pytest.approx(30.0)
    assert returned_bytes(1, 2, 4, 10, result_bytes=2, num_slices=2) == pytest.approx(120.0)
    assert (copies_sent(1, 2, 4), copies_once(1, 2, 4, 8)) == pytest.approx((1.5, 1.3929), rel=1e-4)
    assert copies_sent(128, 8, 64) / 128 == pytest.approx(float(copies_per_token(V3, 64, PAPER)))
    for bits, megabytes, microseconds in ((8, 7.22534, 185.634), (16, 14.4507, 366.267)):
        size = copies_sent(128, 8, 64) * 7168 * bits / 8
        assert size / 1e6 == pytest.approx(megabytes, rel=1e-5)
        assert (5e-6 + size / 40e9) * 1e6 == pytest.approx(microseconds, rel=1e-5)


def test_once_a_node_is_less_than_once_a_device_and_as_drawn() -> None:
    flat, by_node = copies_over_nodes(128, 8, 64, 8, 256)
    assert by_node < 0.75 * flat
    assert by_node <= 128 * 7
    topics = np.zeros(4000, np.int64)
    chosen = TopicTraffic.zipf(256, 0.0).draw(np.random.default_rng(0), topics, 8)
    nodes, cards = chosen // 32, chosen // 4
    crossing = [len({n for n in row if n}) for row in nodes.tolist()]  # from node 0
    assert np.mean(crossing) * 128 == pytest.approx(by_node, rel=0.02)
    devices = [len({c for c in row if c >= 8}) for row in cards.tolist()]
    assert np.mean(devices) * 128 == pytest.approx(flat, rel=0.02)


@pytest.mark.parametrize(("local", "less"), [(0.7, 0.4), (0.8, 0.6)])
def test_replicas_in_the_own_node_first(local: float, less: float) -> None:
    assert crossing_share(local, 2) == pytest.approx((1 - local, less))
    assert crossing_share(0.5, 2)[1] == 0.0  # as much as without


def test_what_other_work_hides() -> None:
    assert hidden_share(2.0, 3.0) == 1.0
    assert hidden_share(4.0, 3.0) == pytest.approx(0.75)


def test_experts_by_tensor_parallel_bytes() -> None:
    assert [expert_by_tensor_bytes(*case) for case in ((2, 8), (8, 8), (8, 4))] == [0.25, 1.0, 2.0]


def test_payload_of_buffers_for_the_worst_case() -> None:
    assert payload_share(8, 64) == pytest.approx(0.126984, rel=1e-5)
    assert payload_share(2, 4, num_experts=8) == pytest.approx(0.464286, rel=1e-5)
    assert pytest.approx(1 - comb(6, 2) / comb(8, 2), rel=1e-5) == 0.464286
    assert payload_share(2, 4) == pytest.approx(2 / 3)
    # The notes' 54 to 57 % in the worst case are 87 to 91 % at a capacity factor of 1.25.
    for worst, sized in ((0.54, 0.864), (0.57, 0.912)):
        assert worst / (1.25 * 2 / 4) == pytest.approx(sized)


def test_reported_launches() -> None:
    assert REPORTED_LAUNCHES["FlashMoE"] == 1
    assert sorted(REPORTED_LAUNCHES.values()) == [1, 33, 85, 261, 432, 550]
    assert launch_seconds(550) == pytest.approx(2.75e-3)
