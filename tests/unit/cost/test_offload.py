"""Experts outside the devices: the arithmetic, and speeds that others measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moesaic.account.memory import expert_bytes
from moesaic.account.params import expert_params
from moesaic.cost.layouts import Split, memory_per_rank, step_cost
from moesaic.cost.load import EVEN, zipf_shares
from moesaic.cost.offload import break_even_rows, cold_distinct, cold_share, layers_bytes, tiers, transfer_s
from moesaic.cost.ops import Formats, Work
from moesaic.cost.profile import PAPER
from moesaic.cost.term import leaves, step_seconds
from moesaic.planner.fit import fit
from moesaic.planner.load_file import skewed
from moesaic.planner.residency import residency
from moesaic.spec.families import read_config
from moesaic.spec.hardware import Cluster, Fact, cluster
from moesaic.spec.locate import preset


def model(name: str):
    return read_config(preset(name).config, name=name)


QWEN235 = model("qwen3-235b-a22b")
QWEN30 = model("qwen3-30b-a3b")


def with_facts(cards: Cluster, **facts: float) -> Cluster:
    own = {name: Fact(value=value, source="test") for name, value in facts.items()}
    return replace(cards, machine=replace(cards.machine, facts={**cards.machine.facts, **own}))


# -- arithmetic of the lectures ----------------------------------------------------------------------------


@pytest.mark.parametrize(("resident", "gib", "fits"), [(32, 105.75, False), (16, 52.875, True)])
def test_resident_experts_of_a_card(resident: int, gib: float, fits: bool) -> None:
    a100 = with_facts(cluster("a100"), host_memory_bytes=2e12)
    held = residency(QWEN235, a100, 128 - resident, 1, "bfloat16", EVEN)
    assert held.resident_bytes / 2**30 == pytest.approx(gib, rel=1e-6)
    assert (held.device, held.host, held.disk) == (resident, 128 - resident, 0)
    assert (held.resident_bytes < a100.machine.memory_bytes) == fits
    assert held.local_share == pytest.approx(resident / 128)


def test_rows_from_which_sending_an_expert_pays() -> None:
    moe = QWEN235.moe_layers[0][1]
    size = expert_bytes(QWEN235, moe, "bfloat16")
    assert size / 220e9 == pytest.approx(0.171585e-3, rel=1e-5)
    assert transfer_s(size, 50e9)[0] == pytest.approx(0.754975e-3, rel=1e-5)
    assert break_even_rows(size, expert_params(moe), 2e12, 50e9) == pytest.approx(40.0)


@pytest.mark.parametrize(("name", "ms"), [("mixtral-8x7b", 7.04643), ("mixtral-8x22b", 12.0796)])
def test_sending_an_expert_and_what_of_it_shows(name: str, ms: float) -> None:
    spec = model(name)
    size = expert_bytes(spec, spec.moe_layers[0][1], "bfloat16")
    assert transfer_s(size, 50e9)[0] * 1e3 == pytest.approx(ms, rel=1e-5)
    assert transfer_s(size, 50e9, 5e-3)[1] * 1e3 == pytest.approx(ms - 5)
    assert transfer_s(size, 50e9, 1.0)[1] == 0.0


def test_the_coldest_leave_first() -> None:
    shares = zipf_shares(64, 0.8).of_layer(0)
    cold = cold_share(shares, 64, np.array([0, 16, 64]))
    assert cold[0] == 0.0
    assert 0 < cold[1] < 16 / 64  # a quarter of the experts, less than a quarter of the choices
    assert cold[2] == pytest.approx(1.0)
    rng = np.random.default_rng(0)
    hit = [np.isin(np.argsort(shares)[:16], rng.integers(0, 64, 24)).sum() for _ in range(2000)]
    assert float(cold_distinct(None, 64, 1, 24, 16)) == pytest.approx(np.mean(hit), rel=0.03)


def test_tiers_fill_from_the_nearest_and_say_what_is_missing() -> None:
    each = layers_bytes(QWEN30, "bfloat16")
    small = with_facts(
        cluster("rtx-4090"), host_memory_bytes=50 * each / 0.9 * 1.001, disk_bytes=30 * each / 0.9 * 1.001
    )
    held = tiers(QWEN30, small, np.array([40.0, 70.0, 100.0]), 1, "bfloat16")
    assert np.asarray(held.host).tolist() == [40, 50, 50]
    assert np.asarray(held.disk).tolist() == [0, 20, 30]
    assert np.asarray(held.missing) == pytest.approx([0, 0, 20 * each])


# -- a step ------------------------------------------------------------------------------------------------


def seconds(cards: Cluster, num_offloaded, rows: float = 1.0, shares=EVEN) -> np.ndarray:
    off = np.asarray(num_offloaded, np.float64)
    split = Split(tp=np.ones_like(off), num_offloaded=off)
    work = Work(num_seqs=rows, new_tokens=1.0, past=1024.0)
    cost = step_cost(QWEN30, cards, split, work, profile=PAPER, shares=shares)
    return np.broadcast_to(step_seconds(cost).value, off.shape)


def test_the_more_experts_elsewhere_the_slower_and_less_memory() -> None:
    cards, off = cluster("rtx-4090"), np.arange(0, 129, 16)
    assert np.all(np.diff(seconds(cards, off)) > 0)
    assert seconds(cards, off)[0] == pytest.approx(float(seconds(cards, 0)))
    parts = memory_per_rank(
        QWEN30, Split(tp=1, num_offloaded=64), num_seqs=0, context=0, max_rows=0, profile=PAPER
    )
    assert float(parts["experts"]) == 64 * layers_bytes(QWEN30, None)


def test_few_rows_are_computed_by_the_host_and_many_wait_for_the_bus() -> None:
    cards, resources = cluster("rtx-4090"), {}
    for rows in (1.0, 4096.0):
        work = Work(num_seqs=rows, new_tokens=1.0, past=1024.0)
        cost = step_cost(QWEN30, cards, Split(num_offloaded=64), work, profile=PAPER, shares=EVEN)
        resources[rows] = {
            term.resource for _, term in leaves(cost) if term.name == "expert_load" and term.seconds.value > 0
        }
    assert resources == {1.0: {"memory"}, 4096.0: {"host_link"}}


def test_popular_experts_on_the_device_help() -> None:
    cards = cluster("rtx-4090")
    hot = zipf_shares(128, 0.6)
    assert float(seconds(cards, 64, shares=hot)) < 0.9 * float(seconds(cards, 64))
    assert float(seconds(cards, 0, shares=hot)) == pytest.approx(float(seconds(cards, 0)), rel=0.02)


# -- what others measured ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "machine", "facts", "context", "measured"),
    [
        # KTransformers, DeepSeek-V3 Q4_K_M: RTX 4090 and one or two Xeon Gold 6454S.
        ("deepseek-v3", "rtx-4090",
         {"host_memory_bytes": 1e12, "host_memory_bytes_per_s": 307.2e9, "host_flops_per_s": 1e13},
         1000, 8.73),
        ("deepseek-v3", "rtx-4090",
         {"host_memory_bytes": 1e12, "host_memory_bytes_per_s": 614.4e9, "host_flops_per_s": 2e13},
         1000, 12.2),
        # llama.cpp, Qwen3-30B-A3B Q4_K_M: RTX 2080 of 8 GB and DDR4.
        ("qwen3-30b-a3b", "rtx-4090",
         {"memory_bytes": 8e9, "memory_bytes_per_s": 448e9, "host_memory_bytes": 64e9,
          "host_memory_bytes_per_s": 102e9, "host_flops_per_s": 1e12}, 1000, 36.7),
    ],
)  # fmt: skip
def test_measured_decode_speeds_within_a_factor_of_two(name, machine, facts, context, measured) -> None:
    found = fit(model(name), name, with_facts(cluster(machine), **facts), context=context,
                weight_format="int4")  # fmt: skip
    assert found.verdict == "fits_offloaded"
    assert measured / 2 < float(found.tokens_per_s.value) < measured * 2


def test_where_llama_cpp_puts_qwen() -> None:
    """Qwen3-30B in 16 bits on 24,077 MiB: 17,904 MiB of weights and 384 MiB of KV stay on the device."""
    card = with_facts(cluster("rtx-4090"), memory_bytes=24_077 * 2**20, host_memory_bytes=256e9)
    found = fit(QWEN30, "q", card, context=4096, weight_format="bfloat16")
    assert found.verdict == "fits_offloaded"
    assert found.rank_bytes["kv"] == 384 * 2**20
    held = (found.rank_bytes["weights"] + found.rank_bytes["experts"]) / 2**20
    assert held == pytest.approx(17_904, rel=0.2)  # llama.cpp moves whole layers, and leaves 4 GB free
    assert found.expert_share["host"] == pytest.approx(34 / 48, rel=0.2)


MEASURED = {0.0: 53.0, 0.1: 57.0, 0.5: 71.0, 0.8: 85.0, 1.0: 112.6}
"""Tokens per second of Qwen3-Next-80B FP8 on four RTX 4090 by share of experts there; mean of policies."""


def test_share_of_experts_on_four_devices() -> None:
    qwen = model("qwen3-next-80b-a3b")
    cards = with_facts(
        cluster("rtx-4090x4"), host_memory_bytes=512e9, host_memory_bytes_per_s=460.8e9, host_flops_per_s=1e13
    )
    share = np.array(list(MEASURED))
    split = Split(tp=4.0 * np.ones(5), expert_tp=4, num_offloaded=np.round(512 * (1 - share)))
    work = Work(num_seqs=1.0, new_tokens=1.0, past=1000.0)
    fp8 = Formats(dense="fp8", experts="fp8")
    speeds = [
        1 / step_seconds(step_cost(qwen, cards, split, work, profile=PAPER, formats=fp8, shares=shares)).value
        for shares in (EVEN, skewed(qwen))
    ]
    for speed in speeds:
        assert np.all(np.diff(speed) > -0.01 * speed[-1])  # a few hide behind the devices' own work
        mine, theirs = speed / speed[-1], np.array(list(MEASURED.values())) / 112.6
        assert np.all((theirs / 2 < mine) & (mine < theirs * 2))
    assert np.all(
        speeds[1][1:4] > speeds[0][1:4]
    )  # popular experts on the devices: 70.2 against 56.6 at 10 %
