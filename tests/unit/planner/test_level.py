"""What measured runs say beyond the prices: one level for all layouts, in the search and in the plan."""

from dataclasses import replace

import numpy as np
import pytest

from moesaic.cost.calibrated import shipped
from moesaic.cost.ops import Formats
from moesaic.planner.demand import Demand
from moesaic.planner.load_file import skewed
from moesaic.planner.pools import Refused, decode_rows
from moesaic.planner.price import pricer_of
from moesaic.planner.question import clusters_of, format_choices
from moesaic.planner.residency import offloaded_blocks
from moesaic.planner.search import Question, search
from moesaic.planner.sensitivity import FACTORS, sensitivities
from moesaic.planner.space import blocks
from moesaic.spec.families import read_config
from moesaic.spec.locate import locate


def calibrated_pricer(machine="h100x2", name="mixtral-8x7b"):
    spec = read_config(locate(name).config, name=name)
    (cards,) = clusters_of([machine], ())
    return pricer_of(spec, cards, "calibrated", skewed(spec)), format_choices(
        spec, "stored", "bfloat16", None
    )


def test_one_level_corrects_every_layout_and_batch():
    pricer, choices = calibrated_pricer()
    demand = Demand(isl=2048, osl=512, tpot_s=0.03)
    space, _ = blocks(pricer.model, pricer.cluster, choices, {})
    plain = replace(pricer, calibration=None)
    for role in ("serve", "decode"):
        level = pricer.level(choices[0].formats, demand, role)
        assert level != 1.0
        for block in space:
            for batch in (1.0, 64.0):
                many = np.full(len(block), batch)
                mine = pricer.decode_interval(block, many, demand, role).value
                assert mine == pytest.approx(plain.decode_interval(block, many, demand).value * level)
    assert plain.level(choices[0].formats, demand, "serve") == 1.0


def test_corrected_search_equals_a_scan_over_every_batch():
    pricer, choices = calibrated_pricer()
    demand = Demand(isl=2048, osl=512, tpot_s=0.03)
    space, _ = blocks(pricer.model, pricer.cluster, choices, {})
    rows = decode_rows(pricer, space, demand, Refused({}), [0])
    scanned = {}
    for block in space:
        most, _ = pricer.largest_batch(block, "decode", demand)
        for row in range(len(block)):
            batch = np.arange(block.unit[row], most[row] + 1, block.unit[row])
            if len(batch):
                seconds = pricer.decode_interval(block.take(np.full(len(batch), row)), batch, demand).value
                rate = np.where(seconds <= demand.tpot_s, batch * block.columns["dp"][row] / seconds, 0.0)
                size = int(block.devices[row])
                scanned[size] = max(scanned.get(size, 0.0), float(rate.max()))
    for size, rate in scanned.items():
        mine = rows.rate[rows.devices == size] * demand.osl
        assert mine.max(initial=0.0) == pytest.approx(rate, rel=1e-12)


def test_a_plan_has_the_interval_of_corrected_times():
    pricer, _ = calibrated_pricer()
    low, high = shipped().factors("tpot", pricer.model, pricer.cluster, Formats(), sort="plan")
    assert (pricer.profile.low, pricer.profile.high) == (low, high)
    assert low < 1 < high


def test_experts_outside_the_devices_are_priced_without_what_makes_them_sooner():
    pricer, choices = calibrated_pricer("rtx4090", "qwen3-30b-a3b")
    block = offloaded_blocks(pricer.model, pricer.cluster, choices, {})[0]
    for isl, osl, is_longer in ((1024, 1024, True), (8192, 256, False)):
        demand = Demand(isl=isl, osl=osl)
        level = pricer.level(choices[0].formats, demand, "serve")
        assert (level > 1.0) == is_longer
        assert pricer.level_of(block, demand, "serve") == (level if is_longer else 1.0)


def test_a_limit_below_every_time_moves_no_expert_off_the_devices():
    """Devices with room: what is nearest to a limit that nothing holds has its experts on them."""
    name, (cards,) = "qwen3-30b-a3b", clusters_of(["h100"], ())
    spec = read_config(locate(name).config, name=name)
    asked = Question(
        model=spec, clusters=(cards,), demand=Demand(isl=1024, osl=1024, objective="latency"),
        profile="calibrated", shares=skewed(spec), choices=format_choices(spec, "stored", "bfloat16", None),
    )  # fmt: skip
    fastest = search(asked).best
    least = {"tpot_s": fastest.token_s, "ttft_s": float(fastest.ttft.value)}
    for limit, seconds in least.items():
        demand = Demand(isl=1024, osl=1024, **{limit: seconds * 0.95})
        found = search(replace(asked, demand=demand))
        assert found.missed == (limit,)
        assert found.best.decoder.layout["num_offloaded"] == 0


def test_other_rates_start_from_the_corrected_times():
    """Every way to deploy, under the rates of the file, takes the time that the plan says."""
    name, cards = "qwen3-30b-a3b", clusters_of(["h100x3"], ())
    spec = read_config(locate(name).config, name=name)
    asked = Question(
        model=spec, clusters=cards, demand=Demand(isl=1024, osl=1024, tpot_s=0.02), profile="calibrated",
        shares=skewed(spec), choices=format_choices(spec, "stored", "bfloat16", None),
    )  # fmt: skip
    ways = search(asked).ways
    assert {"in one node", "prefill apart", "attention and experts apart"} <= set(ways)
    for plan in ways.values():
        for one in sensitivities(plan, asked):
            if one.name != "skew":
                assert one.tpot_s[FACTORS.index(1.0)] == pytest.approx(plan.token_s, rel=1e-9)
