import itertools
from dataclasses import replace

import numpy as np
import pytest

from moesaic.cost.layouts import Split, memory_per_rank, step_cost
from moesaic.cost.load import zipf_shares
from moesaic.cost.ops import Work
from moesaic.cost.profile import PAPER
from moesaic.cost.serving import Interference, Traffic, phases, prefill_beside_decode
from moesaic.cost.term import step_seconds
from moesaic.errors import CapacityError, ConfigError
from moesaic.planner.compare import CLOSE
from moesaic.planner.demand import Demand
from moesaic.planner.load_file import skewed
from moesaic.planner.pools import Refused, decode_rows, prefill_rows, serve_rows
from moesaic.planner.price import CHUNK_TOKENS, Pricer, largest_within
from moesaic.planner.question import clusters_of, format_choices
from moesaic.planner.search import Question, search
from moesaic.planner.sim.step_time import StepCase, StepTimes
from moesaic.planner.space import blocks, redundancies
from moesaic.spec.families import read_config
from moesaic.spec.locate import locate


def question(model, *machines, pins=None, prices=(), kv="bfloat16", weights="stored", **asked):
    spec = read_config(locate(model).config, name=model)
    demand = Demand(**{"isl": 4096, "osl": 1024, **asked})
    return Question(
        model=spec,
        clusters=clusters_of(machines, prices),
        demand=demand,
        profile="paper",
        shares=skewed(spec),
        choices=format_choices(spec, weights, kv, None),
        pins=pins or {},
    )


def divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


def every_layout(size, num_experts):
    """All splits of Mixtral over `size` devices, written down without the planner's own enumeration."""
    for pp in divisors(size):
        ranks = size // pp
        for tp, kvp, ep in itertools.product(divisors(ranks), repeat=3):
            if ranks % (tp * kvp) or (kvp > 1 and (pp > 1 or tp * kvp != ranks)):
                continue
            for extra in redundancies(num_experts, ep) if ep > 1 else [0]:
                for micro in (1, 2):
                    dp = ranks // (tp * kvp)
                    if (micro == 2 and (dp == 1 or ep == 1)) or (dp > 1 and 1 < ep < ranks):
                        continue
                    yield Split(
                        tp=tp, dp=dp, kvp=kvp, ep=ep, expert_tp=ranks // ep, pp=pp, num_redundant=extra,
                        num_micro_batches=micro,
                    )  # fmt: skip


def scan(asked, split, is_serving):
    """Tokens a second of one instance at the best of every batch, one batch after the other."""
    machine, demand = asked.clusters[0].machine, asked.demand
    unit = split.pp * split.num_micro_batches
    batch = np.arange(unit, 4096 + 1, unit, dtype=np.float64)
    rows = batch + CHUNK_TOKENS * is_serving if demand.isl > CHUNK_TOKENS else batch + demand.isl * is_serving
    memory = memory_per_rank(
        asked.model, split, num_seqs=batch, context=demand.isl + demand.osl, max_rows=rows, profile=PAPER,
        formats=asked.choices[0].formats,
    )  # fmt: skip
    batch = batch[sum(memory.values()) <= 0.9 * machine.memory_bytes]
    common = {"profile": PAPER, "shares": asked.shares, "formats": asked.choices[0].formats}
    if not len(batch):
        return 0.0
    step = step_cost(
        asked.model, asked.clusters[0], split,
        Work(num_seqs=batch, new_tokens=1, past=demand.isl + demand.osl / 2), **common,
    )  # fmt: skip
    tpot, own = step_seconds(step).value, 0.0
    if is_serving:
        prompt = Work(num_seqs=float(split.pp), new_tokens=demand.isl, past=0)
        tree = step_cost(asked.model, asked.clusters[0], split, prompt, **common)
        beside = prefill_beside_decode(tree, batch, Interference())
        own = np.where(batch > 1, beside / split.pp, step_seconds(tree).value) / demand.osl
        tpot = tpot + (batch - 1) * own  # a replica's prompts but one's own
    tokens = np.where(tpot <= demand.tpot_s, batch * split.dp / (tpot + own), 0.0)
    return tokens.max()


@pytest.mark.parametrize("role", ["serve", "decode"])
def test_search_equals_brute_force(role):
    asked = question("mixtral-8x7b", "h100x4", isl=12000, osl=500, tpot_s=0.03)
    pricer = Pricer(model=asked.model, cluster=asked.clusters[0], profile=PAPER, shares=asked.shares)
    space, _ = blocks(asked.model, asked.clusters[0], asked.choices, {})
    every = {}
    for size in (1, 2, 4):
        for split in every_layout(size, 8):
            every[size] = max(every.get(size, 0.0), scan(asked, split, role == "serve"))
    if role == "serve":
        rows = serve_rows(pricer, space, asked.demand, Refused({}))
    else:
        rows = decode_rows(pricer, space, asked.demand, Refused({}), [1])
    for size, tokens in every.items():
        mine = rows.rate[rows.devices == size] * asked.demand.osl
        assert mine.max(initial=0.0) == pytest.approx(tokens, rel=1e-12)


def test_space_is_all_of_it():
    asked = question("mixtral-8x7b", "h100x4", tpot_s=0.03)
    space, _ = blocks(asked.model, asked.clusters[0], asked.choices, {})
    mine = {tuple(sorted(block.row(idx).items())) for block in space for idx in range(len(block))}
    names = (*Split.__dataclass_fields__.keys() - {"overlaps_requests"},)
    every = {
        tuple(sorted((name, getattr(split, name)) for name in names))
        for size in (1, 2, 4)
        for split in every_layout(size, 8)
    }
    assert mine == every
    assert sum(len(block) for block in space) == len(mine)


def test_pools_are_matched_as_brute_force_would():
    asked = question("mixtral-8x7b", "h100x4x2", isl=3000, osl=200, tpot_s=0.05, ttft_s=2.0)
    pricer = Pricer(model=asked.model, cluster=asked.clusters[0], profile=PAPER, shares=asked.shares)
    space, _ = blocks(asked.model, asked.clusters[0], asked.choices, {})
    prefill = prefill_rows(pricer, space, asked.demand, Refused({}), False)
    decode = decode_rows(pricer, space, asked.demand, Refused({}), [0])
    best = 0.0
    for size, rate in {(d, prefill.rate[prefill.devices == d].max()) for d in set(prefill.devices)}:
        for other, served in {(d, decode.rate[decode.devices == d].max()) for d in set(decode.devices)}:
            for count in range(1, int(8 // size) + 1):
                left = (8 - count * size) // other
                best = max(best, min(count * rate, left * served) * 200 / 8)
    answer = search(asked)
    serve = serve_rows(pricer, space, asked.demand, Refused({}))
    best = max(best, (serve.rate * serve.count).max() * 200 / 8)
    assert (1.0 - CLOSE) * best <= answer.best.value <= best * (1 + 1e-12)
    others = [one for one in (answer.best, answer.runner_up) if one.value == pytest.approx(best)]
    assert others or answer.best.value < best


def test_bisection_equals_a_scan():
    rng = np.random.default_rng(0)
    for _ in range(50):
        slope, start = rng.uniform(0.1, 2.0, 20), rng.uniform(0.0, 60.0, 20)
        most, unit = rng.integers(0, 90, 20).astype(float), rng.choice([1.0, 2.0, 4.0], 20)
        most -= most % unit

        def seconds(rows, batch, slope=slope, start=start):
            return start[rows] + slope[rows] * batch

        found = largest_within(seconds, most, unit, 50.0)
        for idx in range(20):
            every = [
                b for b in np.arange(unit[idx], most[idx] + 1, unit[idx]) if start[idx] + slope[idx] * b <= 50
            ]
            assert found[idx] == max(every, default=0.0)


def test_thousands_of_candidates_and_their_misses():
    answer = search(question("deepseek-v3", "h200x8x4", tpot_s=0.05))
    assert answer.num_candidates >= 5000
    assert answer.search_s < 20  # under 2 s alone on a core; this machine may be busy
    assert {"memory", "divisibility"} <= set(answer.ruled_out)
    assert answer.ruled_out["memory"].count > 100
    assert "127 GB" in answer.ruled_out["memory"].nearest
    assert answer.ruled_out["memory"].distance == pytest.approx(1.0, abs=0.6)
    decoder = answer.best.decoder
    assert sum(decoder.memory.values()) <= decoder.usable_bytes
    assert float(answer.best.tpot.value) <= 0.05


def test_objectives_pull_in_their_directions():
    plans = {
        objective: search(question("qwen3-30b-a3b", "h100x8", objective=objective, tpot_s=0.05)).best
        for objective in ("per-gpu", "latency")
    }
    assert float(plans["latency"].tpot.value) < float(plans["per-gpu"].tpot.value)
    assert plans["per-gpu"].tokens_per_s > plans["latency"].tokens_per_s


def test_a_slo_that_nothing_meets_names_the_best_and_what_it_takes():
    asked = question("qwen3-30b-a3b", "h100x4", tpot_s=1e-5)
    answer = search(asked)
    assert answer.missed == ("tpot_s",)
    fastest = float(answer.best.tpot.value)
    assert fastest > 1e-5
    met = search(replace(asked, demand=replace(asked.demand, tpot_s=fastest * 1.001)))
    assert met.missed == ()


def test_what_does_not_fit_says_how_much_is_missing():
    with pytest.raises(CapacityError, match=r"no layout fits h100x1x1.*GB a device of 72.0 GB usable"):
        search(question("llama-3.1-405b", "h100"))


def test_concurrency_must_have_room():
    answer = search(question("qwen3-30b-a3b", "h100x2", concurrency=100_000))
    assert answer.missed == ("concurrency",)
    assert answer.ruled_out["concurrency"].count > 0
    held = search(question("qwen3-30b-a3b", "h100x2", concurrency=64))
    pool = held.best.decoder
    assert pool.batch * pool.layout["dp"] * pool.count >= 64


def test_idle_devices_are_charged_on_one_machine_and_not_on_several():
    one = search(question("mixtral-8x7b", "h100x3", pins={"tp": 2, "dp": 1, "kvp": 1, "pp": 1}))
    assert sum(count for _, count in one.best.charged) == 3
    asked = question("mixtral-8x7b", "h100x3", "h20x8", pins={"tp": 2, "dp": 1, "kvp": 1, "pp": 1})
    several = search(asked)
    used = sum(pool.num_devices for pool in several.best.pools)
    assert sum(count for _, count in several.best.charged) == used


def test_skew_costs_and_redundant_experts_cure_it():
    asked = question("deepseek-v3", "h800x8x16", tpot_s=0.05)
    pins = {"tp": 1, "ep": 128, "pp": 1, "expert_tp": 1, "num_micro_batches": 1}
    spec = asked.model
    asked = replace(asked, shares=zipf_shares(256, 0.6), pins={**pins, "num_redundant": 0})
    skewed_one = search(asked).best.value
    even = search(replace(asked, shares=zipf_shares(256, 0.0))).best.value
    cured = search(replace(asked, pins={**pins, "num_redundant": 128})).best.value
    assert spec.moe_layers
    assert even > 1.3 * skewed_one
    assert cured > 1.2 * skewed_one


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"tp": 6}, r"128 attention heads / tp 6 = 21\.33; the nearest legal numbers are 4 and 8"),
        ({"expert_tp": 3}, r"2048 columns of an expert / expert_tp 3 = 682\.67; .* 2 and 4"),
        ({"ep": 24, "num_redundant": 0}, r"256 experts \+ 0 redundant = 256 slots / ep 24 = 10\.67.* 8"),
        ({"num_offloaded": 300}, "num_offloaded 300 is more than the 256 experts of a layer"),
        ({"ep": 64}, r"ep 64 needs at least 64 devices, h200x8x1 has 8"),
        ({"pp": 70}, r"pp 70 is more stages than the 61 layers"),
        ({"tp": 0}, "tp must be at least 1"),
        ({"tp": 2, "dp": 2, "kvp": 1, "ep": 8, "expert_tp": 1}, r"= 4 ranks, experts have .* = 8"),
    ],
)
def test_impossible_layouts_are_refused_with_the_arithmetic(pins, message):
    with pytest.raises(ConfigError, match=message):
        search(question("deepseek-v3", "h200x8", pins=pins))


@pytest.mark.parametrize(("model", "machine"), [("deepseek-v3", "h200x8"), ("qwen3-30b-a3b", "h100x4")])
def test_a_request_alone_waits_for_no_other_prompt(model, machine):
    asked = question(model, machine, isl=50_000, osl=100, concurrency=1, tpot_s=0.05)
    best = search(asked).best
    assert best.prefill_share == 0.0
    assert float(best.tpot.value) == pytest.approx(float(step_seconds(best.decode).value), rel=1e-12)
    # Its own prompt still takes its instance's time.
    both_s = 100 * float(best.tpot.value) + float(step_seconds(best.prefill).value)
    if best.decoder.role == "serve" and best.decoder.layout["pp"] == 1:
        assert best.tokens_per_s == pytest.approx(100 / both_s, rel=1e-9)


def test_n_requests_on_a_replica_wait_for_n_less_one_prompts():
    pins = {"tp": 4, "dp": 1, "kvp": 1, "pp": 1, "ep": 1}
    asked = question("qwen3-30b-a3b", "h100x4", pins=pins, isl=2000, osl=100, concurrency=5)
    best = search(asked).best
    step_s = float(step_seconds(best.decode).value)
    assert best.decoder.batch == 5
    beside_s = float(prefill_beside_decode(best.prefill, 5.0, Interference()))
    assert beside_s < float(step_seconds(best.prefill).value)
    assert float(best.tpot.value) == pytest.approx(step_s + 4 * beside_s / 100, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "machine", "pins"),
    [
        ("qwen3-30b-a3b", "h100x4", {"tp": 4, "ep": 1}),
        ("qwen3-30b-a3b", "h100x4", {"tp": 1, "dp": 4, "ep": 4, "num_redundant": 0}),
        ("deepseek-v3", "h200x8", {"tp": 8, "ep": 8, "num_redundant": 0}),
    ],
)
def test_planner_engine_and_simulator_charge_the_same_for_prompts(model, machine, pins):
    """A layout's time per token in a plan is that of the model which measured services were fitted with."""
    pins = {"kvp": 1, "pp": 1, "num_micro_batches": 1, **pins}
    dp = pins.get("dp", 1)
    asked = question(model, machine, isl=2048, osl=256, concurrency=8 * dp, pins=pins)
    asked = replace(asked, profile="calibrated")
    pricer = asked.pricer(asked.clusters[0])
    space, _ = blocks(asked.model, asked.clusters[0], asked.choices, pins)
    rows = serve_rows(pricer, space, asked.demand, Refused({}))
    split = Split(tp=pins["tp"], dp=dp, ep=pins["ep"], expert_tp=pins["tp"] * dp // pins["ep"])
    common = {"profile": pricer.profile, "formats": asked.choices[0].formats, "shares": asked.shares}
    seen = phases(
        asked.model, pricer.cluster, split, Traffic(prompt=2048.0, output=256.0, batch=8.0),
        interference=pricer.interference, **common,
    )  # fmt: skip
    tpot_s = rows.tpot_s[0] / pricer.level_of(space[0], asked.demand, "serve")
    assert tpot_s == pytest.approx(float(seen.tpot_s), rel=1e-9)
    case = StepCase(
        model=asked.model, cluster=pricer.cluster, split=split, interference=pricer.interference, **common
    )
    times = StepTimes(case, max_batch=8, max_new=2048, max_past=2304)
    charged = (tpot_s - float(seen.decode_s)) * 256 / 7
    assert times.beside_s(2048, 0, 8) == pytest.approx(charged, rel=1e-9)


def test_one_token_out_has_no_time_per_token_and_fails_no_limit_on_it():
    answer = search(question("qwen3-30b-a3b", "h100x2", osl=1, tpot_s=1e-5))
    assert answer.missed == ()
    assert answer.best.tpot is None
    assert {pool.role for pool in answer.best.pools} == {"serve"}
    # A request is its prompt: as many a second as prompts are computed.
    pool, prompt_s = answer.best.decoder, float(step_seconds(answer.best.prefill).value)
    most = pool.count * pool.layout["dp"] * pool.layout["pp"] / prompt_s
    assert answer.best.tokens_per_s == pytest.approx(most, rel=0.1)
    held = search(question("qwen3-30b-a3b", "h100x2", osl=1, ttft_s=1e-5))
    assert held.missed == ("ttft_s",)


@pytest.mark.parametrize(
    ("model", "machine", "asked"),
    [
        ("deepseek-v3", "h200x8", {"ttft_s": 0.05}),
        ("deepseek-v3", "h200x8", {"ttft_s": 0.05, "concurrency": 64}),
        ("qwen3-30b-a3b", "h100x4", {"ttft_s": 0.001}),
        ("qwen3-30b-a3b", "h100x4", {"tpot_s": 0.0005, "isl": 500}),
        ("qwen3-30b-a3b", "h100x2", {"concurrency": 10**6}),
    ],
)
def test_what_it_would_take_is_enough_and_nothing_less_is(model, machine, asked):
    profile = "paper" if "tpot_s" in asked else "calibrated"
    whole = replace(question(model, machine, **asked), profile=profile)
    answer = search(whole)
    (missed,) = answer.missed
    reason = missed.removesuffix("_s")
    best = answer.best
    if missed == "concurrency":
        needed, less = best.num_sequences, None
        assert str(needed) in answer.ruled_out[reason].nearest
    else:
        needed = float((best.ttft if missed == "ttft_s" else best.tpot).value)
        less = needed * 0.999
        needed *= 1 + 1e-9
        assert f"{needed * 1e3:.4g} ms" in answer.ruled_out[reason].nearest
    assert search(replace(whole, demand=replace(whole.demand, **{missed: needed}))).missed == ()
    if less is not None:
        assert search(replace(whole, demand=replace(whole.demand, **{missed: less}))).missed == (missed,)


def test_slices_of_experts_hold_whole_blocks_of_scales():
    asked = question("deepseek-v3", "h200x8x4")  # 2048 columns, 128 of them share a scale
    space, misses = blocks(asked.model, asked.clusters[0], asked.choices, {})
    assert max(block.columns["expert_tp"].max() for block in space) == 16
    assert "divisibility" in misses
    qwen = question("qwen3-30b-a3b", "h100x8", weights="fp8,bfloat16")  # 768 columns
    space, _ = blocks(qwen.model, qwen.clusters[0], qwen.choices, {})
    widest = {
        one.choice.weights: one.columns["expert_tp"].max() for one in space if one.num_micro_batches == 1
    }
    assert widest == {"fp8": 2, "bfloat16": 8}
    narrow = question("qwen3-30b-a3b", "h100x8", weights="fp8", pins={"expert_tp": 4})
    message = r"768 columns of an expert / expert_tp 4 = 192, no multiple of the 128 .*; .* are 3 and 6"
    with pytest.raises(ConfigError, match=message):
        search(narrow)
    assert all(pool.layout["expert_tp"] in (1, 2) for pool in search(replace(narrow, pins={})).best.pools)
