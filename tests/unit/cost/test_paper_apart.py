"""Attention and experts on devices of their own, as the lecture notes price them on A800, H20 and L40S."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from moesaic.cost import ops
from moesaic.cost.comm import all_reduce
from moesaic.cost.layouts import Split, memory_per_rank, step_cost
from moesaic.cost.load import EVEN
from moesaic.cost.ops import Context, Formats, Work
from moesaic.cost.pingpong import (
    Stage,
    balanced_replicas,
    busy_share,
    fewest_micro_batches,
    fit_line,
    overlapped_seconds,
    paper_micro_batches,
    paper_seconds,
    per_price,
    pipeline_seconds,
)
from moesaic.cost.profile import PAPER
from moesaic.cost.term import step_seconds
from moesaic.cost.two_sided import Sides, TwoSides, stage
from moesaic.errors import ConfigError
from moesaic.planner.balanced import balance_of, balanced_search
from moesaic.planner.demand import Demand
from moesaic.planner.disaggregate import grids
from moesaic.planner.pools import Refused
from moesaic.planner.price import Pricer
from moesaic.planner.question import format_choices
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster, machine
from moesaic.spec.locate import preset
from moesaic.spec.model import ModelSpec

A800 = cluster("a800x8x6")
PLANS = {"mixtral-8x22b": (8, 1, 4, 3, 620), "dbrx": (16, 3, 2, 4, 321), "scaled": (32, 7, 2, 4, 252)}
"""Experts, attention replicas, their tensor parallelism, micro-batches, sequences of each."""
SERVED = Demand(isl=571, osl=159, tpot_s=0.15)  # 651 tokens on average


@cache
def model(name: str) -> ModelSpec:
    """A preset, or the Scaled-MoE of MegaScale-Infer: 317B parameters, 32 experts of which 4 are chosen."""
    config = dict(preset("dbrx" if name == "scaled" else name).config)
    if name == "scaled":
        ffn = {**config["ffn_config"], "ffn_hidden_size": 8192, "moe_num_experts": 32, "moe_top_k": 4}
        config |= {"d_model": 8192, "n_layers": 48, "n_heads": 64, "ffn_config": ffn}
    return read_config(config, name=name)


def plan_stage(name: str, *, replicas: float | np.ndarray | None = None, batch: float = 0.0) -> Stage:
    experts, nodes, tp, _, planned = PLANS[name]
    grid = TwoSides(
        num_attention=nodes if replicas is None else replicas, tp=tp, ep=experts, expert_tp=1,
        num_redundant=0, num_micro_batches=1,
    )  # fmt: skip
    sides = Sides(attention=A800, experts=A800, profiles=(PAPER, PAPER))
    work = Work(num_seqs=batch or planned, new_tokens=1, past=650)
    return stage(model(name), sides, grid, work, formats=Formats(), shares=EVEN)


# -- formulas ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("many", "seconds", "share"), [(1, 6.0, 1 / 3), (4, 10.0, 0.8)])
def test_known_timelines(many: int, seconds: float, share: float) -> None:
    one = Stage(attention_s=1.0, expert_s=1.0, transfer_s=0.5)
    assert float(pipeline_seconds(one, many, 2)) == pytest.approx(seconds)
    assert busy_share(one, many, 2) == pytest.approx(share)


def test_formula_five_is_refused_where_it_is_wrong() -> None:
    lonely = Stage(attention_s=1.0, expert_s=1.0, transfer_s=0.3)
    assert overlapped_seconds(lonely, 1, 56) == pytest.approx(57.6)
    assert float(pipeline_seconds(lonely, 1, 56)) == pytest.approx(145.6)
    with pytest.raises(ConfigError, match=r"at least 2 \(1 \+ Tc / Tf\) = 2\.60 micro-batches, got 1"):
        paper_seconds(lonely, 1, 56)
    even = Stage(attention_s=1.0, expert_s=1.0, transfer_s=0.5)
    assert paper_seconds(even, 4, 2) == pytest.approx(10.0)


def test_micro_batches_by_the_paper_and_exactly() -> None:
    one = Stage(attention_s=0.4, expert_s=0.5, transfer_s=0.3)
    assert (paper_micro_batches(one), fewest_micro_batches(one)) == (4, 3)
    found = [float(pipeline_seconds(one, many, 40)) for many in (2, 3, 4)]
    assert found == pytest.approx([60.5, 61.0, 81.0])
    assert overlapped_seconds(one, 2, 40) == pytest.approx(41.0)
    for transfer, least in ((0.49, 3), (0.51, 4)):
        assert paper_micro_batches(Stage(attention_s=1.0, expert_s=1.0, transfer_s=transfer)) == least


def test_lines_and_the_replicas_that_balance_them() -> None:
    attention = fit_line([1, 2, 4], [3.0, 5.0, 9.0])
    assert (attention.slope, attention.start, attention.fit) == pytest.approx((2.0, 1.0, 1.0))
    floor = fit_line([1, 2, 3, 4, 5], [4.0, 4.0, 4.0, 4.0, 5.0])  # reading weights is no line
    assert floor.fit < 0.6
    experts = fit_line([10, 20], [5.0, 9.0])
    assert balanced_replicas(attention, experts, 16, 4) == pytest.approx(2.0 * 16 / (0.4 * 4))


def test_tokens_by_price() -> None:
    h20, l40s = machine("h20").number("price", 0), machine("l40s").number("price", 0)
    assert per_price(1000.0, 0.1, 8, 8, h20, l40s) == pytest.approx(10_000 / (8 * 1.85 + 8 * 1.08))


def test_what_a_pair_of_devices_sends() -> None:
    """128 sequences, top 2 of 8, width 6144, bfloat16, attention on two devices: 196,608 bytes a pair."""
    assert 128 * 2 / 8 * 6144 * 2 / 2 == 196_608
    one = plan_stage("mixtral-8x22b", batch=128.0)
    sent = 128 * 2 * 6144 * 2 / 4  # to all eight, from each of four attention devices
    rate = machine("a800").facts["network_bytes_per_s"].value * 0.8
    assert float(one.transfer_s) == pytest.approx(5e-6 + sent / rate)


# -- plans of the notes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ratio", "gains"),
    [
        ("mixtral-8x22b", 0.450743, (1.98711, 1.370606, 1.0)),
        ("dbrx", 0.903878, (1.98621, 1.491828, 1.197143)),
        ("scaled", 1.01544, (1.98904, 1.49, 1.256514)),
    ],
)
def test_transfer_by_compute_and_what_micro_batches_bring(name, ratio, gains) -> None:
    one, layers = plan_stage(name), len(model(name).layers)
    assert float(one.transfer_s / one.forward_s) == pytest.approx(ratio, rel=1e-3)
    many = np.arange(1, 5)
    speed = many / pipeline_seconds(one, many, layers)
    assert speed[1:] / speed[:-1] == pytest.approx(gains, abs=6e-3)


def test_devices_peak_at_four_attention_replicas() -> None:
    """DBRX, two devices a replica, 16 experts, three micro-batches of 128."""
    replicas = np.arange(1.0, 13.0)
    one = plan_stage("dbrx", replicas=replicas, batch=128.0)
    per_device = 3 * 128 * replicas / pipeline_seconds(one, 3, 40) / (2 * replicas + 16)
    assert replicas[np.argmax(per_device)] == 4
    tbt = pipeline_seconds(one, 3, 40)
    assert tbt[3] / tbt[0] < 1.2  # flat as long as experts wait for their weights
    assert tbt[11] / tbt[5] > 1.6  # then linear
    slope = (one.expert_s[11] - one.expert_s[10]) / 32
    work_s = float(np.asarray(one.attention_s).ravel()[0]) - 5e-6  # without its launch
    assert work_s / (slope * 32) == pytest.approx(2.96939, rel=1e-3)


def search_all(name: str, pricers, objective: str = "per-gpu"):
    demand = replace(SERVED, objective=objective)
    choice = format_choices(model(name), "stored", "bfloat16", None)[0]
    pins = {"ep": PLANS[name][0], "num_redundant": 0}
    return demand, choice, grids(pricers, choice, demand, pins, Refused({}))


def pricers_of(name: str, attention: str, experts: str) -> tuple[Pricer, Pricer]:
    both = [
        Pricer(model=model(name), cluster=cluster(one), profile=PAPER, shares=EVEN)
        for one in dict.fromkeys((attention, experts))
    ]
    return both[0], both[-1]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mixtral-8x22b", marks=pytest.mark.long),
        "dbrx",
        pytest.param("scaled", marks=pytest.mark.long),
    ],
)
def test_exhaustive_search_finds_the_plans_and_the_short_one_comes_near(name: str) -> None:
    """Attention over 2 to 4 devices, experts whole. The formula for replicas is low where weights weigh."""
    pricers = pricers_of(name, "a800x8x6", "a800x8x6")
    demand, choice, found = search_all(name, pricers)
    used = sum(found.usage)
    best = int(np.argmax(found.rate / used))
    grid, (experts, replicas, tp, many, _) = found.grid(best), PLANS[name]
    assert (grid.ep, grid.num_attention, grid.tp, grid.num_micro_batches, grid.expert_tp) == (
        experts, replicas, tp, many, 1,
    )  # fmt: skip
    short = balanced_search(pricers, choice, demand)
    assert short.grid.expert_tp == 1
    assert 0.9 < short.value / (found.rate * demand.osl / used).max() <= 1 + 1e-9
    balance = balance_of(pricers, choice, demand, 4, 1)
    same = (found.columns["tp"] == 4) & (found.columns["expert_tp"] == 1)
    nearest = found.columns["num_attention"][same][np.argmax((found.rate / used)[same])]
    assert balance.attention.fit > 0.99
    assert balance.experts.fit > 0.99
    assert (nearest - balance.replicas <= 1) or name == "scaled"
    assert nearest / balance.replicas < 2.5


# -- against one kind of device that does both ---------------------------------------------------------------


COLOCATED = {"mixtral-8x22b": (1, 1973, 0.1331), "dbrx": (1, 2658, 0.1500), "scaled": (2, 2023, 0.1484)}
"""Stages of eight A800, sequences, seconds a step."""


def colocated(name: str, stages: int, batch: float, cards: str = "a800x8") -> float:
    split = Split(tp=8, expert_tp=8, pp=stages)
    work = Work(num_seqs=batch, new_tokens=1, past=650)
    cost = step_cost(model(name), cluster(f"{cards}x{stages}"), split, work, profile=PAPER, shares=EVEN)
    return float(step_seconds(cost).value)


def apart(name: str) -> tuple[float, int]:
    """(tokens per second, devices) of the notes' plan."""
    experts, nodes, tp, many, batch = PLANS[name]
    seconds = float(pipeline_seconds(plan_stage(name), many, len(model(name).layers)))
    return batch * many * nodes / seconds, nodes * tp + experts


@pytest.mark.parametrize(("name", "gain"), [("mixtral-8x22b", 0.1365), ("dbrx", 0.0998)])
def test_apart_on_one_kind_of_device_gains_a_tenth(name: str, gain: float) -> None:
    stages, batch, seconds = COLOCATED[name]
    assert colocated(name, stages, batch) == pytest.approx(seconds, rel=2e-3)
    tokens, devices = apart(name)
    assert tokens / devices / (batch / colocated(name, stages, batch) / 8) - 1 == pytest.approx(
        gain, abs=6e-3
    )


def test_rows_attention_and_sums_of_the_colocated_plans() -> None:
    rows, attention_us, sums_us = [], [], []
    for name, (_, batch, _) in COLOCATED.items():
        spec, num_seqs = model(name), batch
        moe = spec.moe_layers[0][1]
        rows.append(num_seqs * moe.experts_per_token / moe.num_experts)
        ctx = Context(model=spec, machine=A800.machine, profile=PAPER, formats=Formats())
        work = Work(num_seqs=num_seqs, new_tokens=1, past=650)
        (mixed,) = ops.mixer(spec.layers[0], work, 8, 1, ctx)
        attention_us.append(float(mixed.memory_s) * 1e6)
        one = all_reduce(
            "ffn_all_reduce", num_bytes=num_seqs * spec.hidden * 2, ranks=8, cluster=cluster("a800x8"),
            profile=PAPER,
        )  # fmt: skip
        sums_us.append(2 * float(one.seconds.value) * 1e6)
    assert (min(rows), max(rows)) == pytest.approx((252.875, 664.5))
    assert (min(attention_us), max(attention_us)) == pytest.approx((416.653, 556.623), rel=5e-3)
    assert (min(sums_us), max(sums_us)) == pytest.approx((586.342, 781.043), rel=5e-3)


@pytest.mark.parametrize(
    ("name", "gain"),
    [
        ("mixtral-8x22b", 2.07782),
        pytest.param("dbrx", 2.18, marks=pytest.mark.long),
        pytest.param("scaled", 2.59687, marks=pytest.mark.long),
    ],
)
def test_h20_for_attention_and_l40s_for_experts_win_per_price(name: str, gain: float) -> None:
    """Against the best of tensor-parallel stages on one kind; the reverse pair loses to all."""
    values = {}
    for attention, experts in (("h20", "l40s"), ("l40s", "h20"), ("h20", "h20"), ("l40s", "l40s")):
        pricers = pricers_of(name, f"{attention}x8x6", f"{experts}x8x6")
        demand, _, found = search_all(name, pricers, "per-price")
        price = [machine(one).number("price", 0) for one in (attention, experts)]
        value = found.rate * demand.osl / (found.usage[0] * price[0] + found.usage[1] * price[1])
        values[attention, experts] = float(value.max(initial=0.0))
    assert max(values, key=values.__getitem__) == ("h20", "l40s")
    assert min(values, key=values.__getitem__) == ("l40s", "h20")
    one_kind = 0.0
    for cards in ("h20", "l40s", "a800", "h800", "l20"):
        for stages in (1, 2, 3, 4):
            batch = largest_colocated(name, stages, cards)
            if batch:
                cost = 8 * stages * machine(cards).number("price", 0)
                seconds = colocated(name, stages, batch, f"{cards}x8")
                one_kind = max(one_kind, batch / seconds / cost)
    assert values["h20", "l40s"] / one_kind == pytest.approx(gain, rel=0.25)


def largest_colocated(name: str, stages: int, cards: str) -> float:
    split = Split(tp=8, expert_tp=8, pp=stages)
    batch = np.arange(stages, 6000.0, stages)
    memory = memory_per_rank(model(name), split, num_seqs=batch, context=651, max_rows=0, profile=PAPER)
    fits = sum(memory.values()) <= 0.9 * machine(cards).memory_bytes
    work = Work(num_seqs=batch, new_tokens=1, past=650)
    cost = step_cost(model(name), cluster(f"{cards}x8x{stages}"), split, work, profile=PAPER, shares=EVEN)
    good = batch[fits & (step_seconds(cost).value <= 0.15)]
    return float(good.max(initial=0.0))
