import itertools
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from moesaic.cost.calibrated import shipped
from moesaic.cost.load import ExpertShares
from moesaic.cost.ops import Work
from moesaic.cost.term import step_seconds
from moesaic.cost.two_sided import Sides, TwoSides, two_sided_memory, two_sided_step
from moesaic.errors import ConfigError
from moesaic.interop.load_file import read_dump
from moesaic.placement.pack import placed_slots
from moesaic.planner.compare import CLOSE
from moesaic.planner.concurrency import Verdict, bands
from moesaic.planner.demand import Demand, stretched, unit_cost
from moesaic.planner.deployment import deployment_of, expert_plan
from moesaic.planner.disaggregate import MICRO_BATCHES, grids
from moesaic.planner.frontier import considered, pareto, point, thinned
from moesaic.planner.load_file import grouped, read_load, skewed
from moesaic.planner.pools import Refused
from moesaic.planner.question import clusters_of, format_choices, price_unit, undeclared_format
from moesaic.planner.search import Question, ep_bands, search
from moesaic.planner.sensitivity import load_per_rank
from moesaic.planner.space import blocks, instance_sizes, parse_pins, redundancies
from moesaic.spec.deployment import from_json
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster
from moesaic.spec.locate import locate


def model_of(name):
    return read_config(locate(name).config, name=name)


def question(name, *machines, **asked):
    spec = model_of(name)
    return Question(
        model=spec,
        clusters=clusters_of(machines, ()),
        demand=Demand(**{"isl": 2000, "osl": 500, **asked}),
        profile="paper",
        shares=skewed(spec),
        choices=format_choices(spec, "stored", "bfloat16", None),
    )


def test_two_sided_search_equals_brute_force():
    asked = question("mixtral-8x7b", "h20x2", "l40sx4", isl=20000, tpot_s=0.06)
    choice, demand = asked.choices[0], asked.demand
    pricers = tuple(asked.pricer(one) for one in asked.clusters)
    sides = Sides(attention=asked.clusters[0], experts=asked.clusters[1], profiles=(pricers[0].profile,) * 2)
    found = grids(pricers, choice, demand, {}, Refused({}))
    best = 0.0
    for tp, expert_tp, ep, many in [(1, 1, 4, 2), (2, 1, 4, 3), (1, 2, 2, 1), (1, 4, 1, 4), (2, 2, 2, 2)]:
        for dp in range(1, 2 // tp + 1):
            for extra in redundancies(8, ep) if ep > 1 else [0]:
                grid = TwoSides(
                    num_attention=dp,
                    tp=tp,
                    ep=ep,
                    expert_tp=expert_tp,
                    num_redundant=extra,
                    num_micro_batches=many,
                )
                batch = np.arange(many, 200.0, many)
                memory = two_sided_memory(
                    asked.model, grid, num_seqs=batch, context=demand.length, profile=pricers[0].profile,
                    formats=choice.formats,
                )  # fmt: skip
                step = two_sided_step(
                    asked.model, sides, grid,
                    Work(num_seqs=batch / many, new_tokens=1, past=demand.mean_context),
                    formats=choice.formats, shares=asked.shares,
                )  # fmt: skip
                good = step_seconds(step).value <= demand.tpot_s
                for part, pricer in zip(memory, pricers, strict=True):
                    good &= sum(part.values()) <= pricer.usable_bytes
                best_here = batch[good].max(initial=0.0)
                mine = [
                    found.batch[idx]
                    for idx in range(len(found.batch))
                    if found.grid(idx) == TwoSides(**{k: float(getattr(grid, k)) for k in found.columns})
                ]
                assert (mine or [0.0]) == [best_here]
                best = max(best, best_here)
    assert best > 0
    assert set(found.columns["num_micro_batches"]) <= set(map(float, MICRO_BATCHES))


@pytest.mark.parametrize(
    ("name", "machines", "asked"),
    [
        ("qwen3-30b-a3b", ["h100x4"], {"isl": 512, "osl": 256}),
        ("gpt-oss-120b", ["mi300xx4"], {"isl": 1024, "concurrency": 256, "ttft_s": 0.5}),
        ("mixtral-8x7b", ["h20x2", "l40sx4"], {"isl": 512, "osl": 128, "objective": "per-price"}),
        ("deepseek-v3", ["h200x8x4"], {"tpot_s": 0.05, "concurrency": 256}),
        ("deepseek-v3", ["h200x8"], {"objective": "latency"}),
        ("qwen3-30b-a3b", ["rtx4090"], {"concurrency": 2}),
        ("qwen3-30b-a3b", ["h100x2"], {"tpot_s": 1e-5}),
    ],
)
def test_bands_cover_every_concurrency_once_and_agree_with_the_answer(name, machines, asked):
    whole = question(name, *machines, **asked)
    answer = search(whole)
    found = ep_bands(whole, answer)
    assert found[0].concurrency_from == 1
    for band, following in itertools.pairwise(found):
        assert following.concurrency_from == band.concurrency_to + 1
        assert following.use_ep != band.use_ep
    held = answer.demand.concurrency or answer.best.num_sequences
    (mine,) = (one for one in found if one.concurrency_from <= held <= one.concurrency_to)
    assert mine.use_ep == any(pool.layout["ep"] > 1 for pool in answer.best.pools if pool.role != "prefill")
    is_alone = machines == ["rtx4090"]
    assert mine.reason == "one device" if is_alone else f"at {held} requests" in mine.reason
    if answer.other_way is None:
        assert mine.gain is None
    else:
        assert mine.gain == max(answer.best.value / answer.other_way.value - 1.0, 0.0)
        assert answer.other_way.use_ep != answer.best.use_ep
    # Reasons argue for what is taken: a time named is shorter, or what else makes the gain is named.
    for band in found:
        times = re.search(r"(TPOT|TTFT) ([\d.]+) instead of ([\d.]+) ms", band.reason)
        if times is not None:
            assert float(times[2]) <= float(times[3])
        else:
            words = "equal|in flight instead of|less to pay|waits for prompts less|no layout|one device"
            assert re.search(words, band.reason)


def test_the_reason_of_a_verdict_is_as_large_as_its_gain():
    whole = question("qwen3-30b-a3b", "h100x2", isl=512, osl=256)
    answer = search(whole)
    for ratio, words in {
        0.5: "50.0% less, but nearer to what no layout meets",
        0.985: "1.5% less, and what is within 2% is equal: ",
        1.0 + 1e-6: "as much, and what is within 2% is equal: ",
        1.004: "0.4% more, and what is within 2% is equal: ",
        1.006: " instead of ",
    }.items():
        plans = replace(answer.best, value=ratio), replace(answer.other_way, value=1.0)
        verdict = Verdict(
            concurrency=4, demand=answer.demand, use_ep=answer.best.use_ep, is_answer=True,
            plans=partial(tuple, plans),
        )  # fmt: skip
        (band,) = bands(lambda _: None, verdict)
        assert band.gain == max(ratio - 1.0, 0.0)
        assert words in band.reason


def test_a_verdict_is_that_of_the_question_at_its_concurrency():
    whole = question("qwen3-30b-a3b", "h100x4", isl=512, osl=256)
    found = ep_bands(whole, search(whole))
    for concurrency in (4, 256):
        (band,) = (one for one in found if one.concurrency_from <= concurrency <= one.concurrency_to)
        best = search(replace(whole, demand=replace(whole.demand, concurrency=concurrency))).best
        assert band.use_ep == best.use_ep


def test_a_dense_model_has_no_bands():
    whole = question("llama-3.1-8b", "h100x2", isl=100, osl=100)
    assert ep_bands(whole, search(whole)) == ()
    space, _ = blocks(whole.model, whole.clusters[0], whole.choices, {})
    assert all(set(block.columns["dp"]) == {1.0} for block in space)


@pytest.mark.parametrize(
    ("name", "machines", "asked"),
    [
        ("deepseek-v2-lite", ["h100x8"], {}),
        (
            "mixtral-8x22b",
            ["h20x8", "l40sx8"],
            {"objective": "per-price", "isl": 571, "osl": 159, "tpot_s": 0.15},
        ),
        ("llama-3.1-8b", ["h100x4"], {"tpot_s": 0.02}),
    ],
)
def test_deployment_round_trips_and_holds_every_expert(name, machines, asked):
    found = search(question(name, *machines, **asked)).best
    spec = model_of(name)
    deployment = deployment_of(found, spec, None)
    text = deployment.to_json()
    assert from_json(text).to_json() == text
    assert deployment.numerics.backend == "auto" or deployment.numerics.backend.startswith("external ")
    assert {one for instance in deployment.instances for one in instance.machines.values()} <= set(machines)
    for instance in deployment.instances:
        assert len(instance.plan.slot_expert) == len(spec.moe_layers)
        slices = instance.layout.experts.size("tp")
        for experts, parts, share in zip(
            instance.plan.slot_expert, instance.plan.slot_slice, instance.plan.slot_share, strict=True
        ):
            held = np.bincount(experts, weights=share, minlength=spec.moe_layers[0][1].num_experts)
            assert held == pytest.approx(slices)  # every slice of an expert serves all of its tokens
            assert set(parts) == set(range(slices))
    assert sum(one.count * one.layout.num_ranks * one.layout.pipeline for one in deployment.instances) == sum(
        pool.num_devices for pool in found.pools
    )


def test_no_copy_of_a_plan_shares_a_rank_with_another_of_its_expert():
    spec = model_of("mixtral-8x7b")
    hot = np.array([600, 560, 120, 120, 20, 10, 10, 10.0])
    shares = ExpertShares(shares=(hot / hot.sum(),))
    assert any(one == other for one, other in placed_slots(hot, 8, 8).expert.reshape(8, 2))  # as EPLB does
    made = expert_plan(spec, 8, 1, 8, shares)
    for ranks, ids, parts in zip(made.slot_rank, made.slot_expert, made.slot_share, strict=True):
        assert len(set(zip(ranks.tolist(), ids.tolist(), strict=True))) == 16
        assert np.bincount(ids, weights=parts) == pytest.approx(1.0)


def test_loads_are_read_and_refused(tmp_path):
    spec, path = model_of("mixtral-8x7b"), tmp_path / "load.json"
    counts = np.random.default_rng(0).integers(1, 100, (32, 8)).astype(float)

    def read(value, key="logical_count"):
        path.write_text(json.dumps({key: value}))
        return read_load(path, spec)

    assert read(counts.tolist()).of_layer(3) == pytest.approx(counts[3] / counts[3].sum())
    assert read([counts.tolist(), counts.tolist()]).of_layer(3) == pytest.approx(counts[3] / counts[3].sum())
    for wrong, message in (
        (counts[:, :7].tolist(), "7 experts, the model has 8"),
        (counts[:5].tolist(), "5 layers; the model has 32"),
        ((-counts).tolist(), "expert 0 of row 0 has the count -"),
        (np.where(counts == counts[4, 2], np.nan, counts).tolist(), "the count nan"),
        ([[1, 2], [3]], "row 1 has 1 entries, row 0 has 2"),
        ([1, 2], r"got the shape \[2\]"),
        (
            np.where(np.arange(32)[:, None] == 5, 0, counts).tolist(),
            "counted nothing in layer 5 of the model",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            read(wrong)
    with pytest.raises(ConfigError, match="no expert load"):
        read([], key="something")


def test_dense_layers_of_a_dump_are_skipped(tmp_path):
    spec, path = model_of("deepseek-v2-lite"), tmp_path / "load.json"
    rows = np.ones((len(spec.layers), 64))
    rows[0] = 0
    path.write_text(json.dumps({"logical_count": rows.tolist()}))
    assert len(read_load(path, spec).shares) == len(spec.moe_layers)


def test_groups_keep_the_order_of_unevenness():
    spec = model_of("mixtral-8x7b")
    shares = read_load_of(spec)
    found = grouped(shares, 4)
    assert len({id(layer) for layer in found.shares}) == 4
    moments = [float(np.square(layer).sum()) for layer in shares.shares]
    kept = [float(np.square(layer).sum()) for layer in found.shares]
    assert spearmanr(moments, kept).statistic > 0.9


def read_load_of(spec):
    from moesaic.cost.load import ExpertShares

    rng = np.random.default_rng(1)
    layers = [rng.dirichlet(np.full(8, scale)) for scale in np.linspace(1, 50, len(spec.moe_layers))]
    return ExpertShares(shares=tuple(layers))


@pytest.mark.parametrize(
    ("machines", "asked"),
    [
        (["h100x4"], {"isl": 2000, "osl": 100, "tpot_s": 0.03}),
        (["h20x2", "l40sx2"], {"isl": 512, "osl": 128, "tpot_s": 0.05, "objective": "per-price"}),
    ],
)
def test_the_frontier_is_of_all_ways_and_the_answer_is_on_it(machines, asked):
    whole = question("mixtral-8x7b", *machines, **asked)
    answer = search(whole)
    found = considered(whole, answer)
    assert set(answer.ways) <= set(found)
    assert sum(len(points[0]) for points in found.values()) > 100
    x, y = (np.concatenate([points[axis] for points in found.values()]) for axis in (0, 1))
    objective = whole.demand.objective
    speed, worth = point(answer.best, objective)
    assert worth == pytest.approx(answer.best.value, rel=1e-9)
    held = (x * (1 + 1e-9) >= 1.0 / asked["tpot_s"]) & (x >= speed)  # as fast, within the limits
    assert y[held].max() * (1.0 - CLOSE) <= worth * (1 + 1e-9)
    assert any(np.any((px == speed) & (py == worth)) for px, py in found.values())


def test_a_thinned_cloud_keeps_its_outline():
    rng = np.random.default_rng(0)
    x, y = rng.lognormal(size=5000), rng.lognormal(size=5000)
    few, low = thinned(x, y, cells=20)
    assert len(few) <= 21 * 21
    places = {(round(np.log(a), 9), round(np.log(b), 9)) for a, b in zip(x, y, strict=True)}
    assert all((round(np.log(a), 9), round(np.log(b), 9)) in places for a, b in zip(few, low, strict=True))
    assert thinned(x[:0], y[:0])[0].size == 0


def test_frontier_has_what_nothing_beats():
    x, y = pareto(np.array([1.0, 2.0, 3.0, 2.5]), np.array([9.0, 5.0, 4.0, 3.0]))
    assert (x.tolist(), y.tolist()) == ([1.0, 2.0, 3.0], [9.0, 5.0, 4.0])
    assert len(pareto(np.zeros(0), np.zeros(0))[0]) == 0


def test_prices_and_formats():
    (one,) = clusters_of(["h200x8"], ["5.5"])
    assert unit_cost(one, "per-price") == 5.5
    assert unit_cost(one, "per-gpu") == 1.0
    for names, prices, message in (
        (["h200x8"], ["h100=5"], "is not one of the machines"),
        (["h200x8"], ["h200=zero"], "a price is a number above 0"),
        (["h200x8", "h200x4"], [], "another kind of device"),
    ):
        with pytest.raises(ConfigError, match=message):
            clusters_of(names, prices)
    spec = model_of("deepseek-v3")
    assert [one.dispatch for one in format_choices(spec, "stored", "bfloat16", None)] == ["fp8"]
    assert len(format_choices(spec, "stored,nvfp4", "bfloat16,fp8", "bfloat16,fp8")) == 8
    with pytest.raises(ConfigError, match="--kv fp9: unknown format; did you mean fp8"):
        format_choices(spec, "stored", "fp9", None)


def test_nodes_without_a_network_are_replicas():
    answer = search(question("olmoe-1b-7b", "rtx-4090x4x2"))
    (pool,) = answer.best.pools
    assert pool.role == "serve"
    assert pool.devices <= 4
    assert pool.num_devices == 8


def test_pins_are_parsed_or_refused():
    assert parse_pins("tp=8, ep=32") == {"tp": 8, "ep": 32}
    assert parse_pins("") == {}
    with pytest.raises(ConfigError, match="'tpp' is no part of a layout; did you mean"):
        parse_pins("tpp=8")
    with pytest.raises(ConfigError, match="is no number of a layout"):
        parse_pins("tp=eight")


def test_instances_need_links_that_the_machine_has():
    assert instance_sizes(cluster("h200x8x3")) == [1, 2, 4, 8, 16, 24]
    assert instance_sizes(cluster("epyc-9654x1x2"))[0] == 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"isl": 0}, "isl must be at least 1, got 0"),
        ({"tpot_s": float("nan")}, "tpot must be above 0"),
        ({"tpot_s": 1e-303}, "between 0.001 and 1e\\+09 ms, got 1e-300 ms"),
        ({"ttft_s": 1e297}, "ttft must be above 0, .* got 1e\\+300 ms"),
        ({"prefix_hit": 1.0}, "from 0 to below 1"),
    ],
)
def test_impossible_demands(asked, message):
    with pytest.raises(ConfigError, match=message):
        Demand(**{"isl": 1, "osl": 1, **asked})


def test_a_length_far_beyond_the_model_is_refused():
    assert stretched(4096, 4096) is None
    assert "engines refuse them unless" in (stretched(32 * 4096, 4096) or "")
    with pytest.raises(ConfigError, match="131073 positions are over 32 times the model's 4096; ask for at"):
        stretched(32 * 4096 + 1, 4096)


@pytest.mark.parametrize(("exponent", "is_legal"), [(4.0, True), (4.1, False), (float("nan"), False)])
def test_a_skew_has_limits(exponent, is_legal):
    spec = model_of("olmoe-1b-7b")
    if is_legal:
        assert skewed(spec, exponent).shares[0].max() > 0.9
        return
    with pytest.raises(ConfigError, match="at least 0 and at most 4"):
        skewed(spec, exponent)


def test_a_price_says_what_it_counts_in():
    both = ["h20x2", "l40sx2"]
    assert price_unit(clusters_of(both, ())) == ("L20 = 1", None)
    assert price_unit(clusters_of(both, ["3"])) == ("as given", None)
    unit, note = price_unit(clusters_of(both, ["l40s=3"]))
    assert unit == "mixed"
    assert "the price of l40s is given, that of h20 is its file's" in note
    assert "--price h20=NUMBER" in note


def test_a_format_that_only_the_name_says_is_noted():
    plain = model_of("olmoe-1b-7b")
    stored = model_of("deepseek-v3")
    assert "--weights nvfp4" in undeclared_format("nvidia--OLMoE-NVFP4.json", plain)
    assert "--weights int4" in undeclared_format("/models/OLMoE-AWQ/", plain)
    assert undeclared_format("olmoe-1b-7b", plain) is None
    assert undeclared_format("/fp8/olmoe", plain) is None
    assert undeclared_format("DeepSeek-V3-FP8", stored) is None


def test_load_of_ranks_covers_every_layout():
    asked = question("olmoe-1b-7b", "h100x4")
    plan = search(asked).best
    for ep, slices in ((4, 1), (2, 2), (1, 4)):
        pool = plan.pools[-1]
        pool = replace(pool, layout={**pool.layout, "ep": ep, "expert_tp": slices, "num_redundant": 0})
        load = load_per_rank(replace(plan, pools=(*plan.pools[:-1], pool)), asked.shares)
        assert load.shape == (4,)
        assert load.mean() == pytest.approx(1.0)
        assert (load.max() > 1.0) == (ep > 1)
        assert len(set(load.tolist())) <= ep


def test_the_page_tells_the_intervals_and_shows_a_load(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "planner.md").read_text()
    (low, high), (first_low, first_high) = (shipped().bounds[one]["plan"] for one in ("tpot", "ttft"))
    assert f"TPOT x {low:.2f} to x {high:.2f}, TTFT x {first_low:.2f} to x {first_high:.2f}" in page
    (shown,) = re.findall(r"^\{\"logical_count.*\}$", page, re.MULTILINE)
    path = tmp_path / "load.json"
    path.write_text(shown)
    assert read_dump(str(path)).counts_LE.shape == (2, 8)
