"""Plans that users rely on. What was feasible must stay so; other drift is printed. `python` on this file
renews them."""

import json
from pathlib import Path

import pytest

from moesaic.planner.demand import Demand
from moesaic.planner.load_file import skewed
from moesaic.planner.pools import Refused, decode_rows
from moesaic.planner.question import clusters_of, format_choices
from moesaic.planner.search import Question, search
from moesaic.planner.space import blocks
from moesaic.spec.families import read_config
from moesaic.spec.locate import locate

PATH = Path(__file__).parent / "plans.json"
CASES = {
    "DeepSeek-V3 on 128 H800": {
        "model": "deepseek-v3", "machines": ["h800x8x16"], "isl": 4096, "osl": 1024, "tpot_s": 0.05,
    },
    "DeepSeek-V3 on 128 H800 as its makers serve it": {
        "model": "deepseek-v3", "machines": ["h800x8x16"], "isl": 4384, "osl": 1211, "tpot_s": 0.05,
        "prefix_hit": 0.563,
    },
    "Llama-405B at a million tokens": {
        "model": "llama-3.1-405b", "machines": ["gb200x4x16"], "isl": 1_000_000, "osl": 1000, "tpot_s": 0.02,
    },
    "Llama-405B at a million tokens that are cached": {
        "model": "llama-3.1-405b", "machines": ["gb200x4x16"], "isl": 1_000_000, "osl": 1000, "tpot_s": 0.02,
        "prefix_hit": 0.9999, "weights": "nvfp4", "kv": "fp4",
    },
    "Mixtral-8x22B per price": {
        "model": "mixtral-8x22b", "machines": ["h20x8x4", "l40sx8x4"], "isl": 571, "osl": 159, "tpot_s": 0.15,
        "objective": "per-price",
    },
    "Qwen3-30B-A3B on four H100": {
        "model": "qwen3-30b-a3b", "machines": ["h100x4"], "isl": 1024, "osl": 512, "tpot_s": 0.03,
        "ttft_s": 1.0,
    },
}  # fmt: skip


def plan(case):
    case = dict(case)
    spec = read_config(locate(case.pop("model")).config, name="model")
    machines = clusters_of(case.pop("machines"), ())
    choices = format_choices(spec, case.pop("weights", "stored"), case.pop("kv", "bfloat16"), None)
    answer = search(
        Question(
            model=spec,
            clusters=machines,
            demand=Demand(**case),
            profile="calibrated",
            shares=skewed(spec),
            choices=choices,
        )
    )  # fmt: skip
    return {
        "is_met": not answer.missed,
        "tokens_per_s_per_gpu": round(answer.best.tokens_per_s_per_gpu, 1),
        "pools": [
            {"role": pool.role, "machine": pool.cluster.machine.name, "devices": pool.devices, **pool.layout}
            for pool in answer.best.pools
        ],
    }


@pytest.fixture(scope="module")
def plans():
    return {name: plan(case) for name, case in CASES.items()}


def test_what_was_feasible_still_is(plans):
    for name, kept in json.loads(PATH.read_text()).items():
        assert plans[name]["is_met"] or not kept["is_met"], f"{name}: was feasible, now not"
        if plans[name] != kept:
            print(f"drift: {name}: {kept} is now {plans[name]}")


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("DeepSeek-V3")])
def test_deepseek_decodes_over_as_many_ranks_as_its_makers_report(plans, name):
    """With copies of hot experts, and over more ranks than it prefills.

    Its makers publish 608e9 tokens in and 168e9 out, 4,989 in the cache on average, and hits of 56.3 %: that
    is 4,384 in and 1,211 out.
    """
    prefill, decode = plans[name]["pools"]
    assert (prefill["role"], decode["role"]) == ("prefill", "decode")
    assert decode["num_redundant"] > 0
    assert prefill["ep"] < decode["ep"]
    assert 64 <= decode["ep"] <= 160


def test_the_smallest_decoder_within_two_percent_of_the_best():
    """By devices alone, whatever prefills beside them: expert parallelism of 64 to 160, hot ranks charged."""
    spec = read_config(locate("deepseek-v3").config, name="model")
    (machine,) = clusters_of(["h800x8x18"], ())
    asked = Question(
        model=spec, clusters=(machine,), demand=Demand(isl=4096, osl=1024, tpot_s=0.05), profile="calibrated",
        shares=skewed(spec), choices=format_choices(spec, "stored", "bfloat16", None),
    )  # fmt: skip
    space, _ = blocks(spec, machine, asked.choices, {"pp": 1, "kvp": 1, "expert_tp": 1})
    rows = decode_rows(asked.pricer(machine), space, asked.demand, Refused({}), [0])
    speed = rows.rate / rows.devices
    best = {int(ep): speed[rows.ep == ep].max() for ep in set(rows.ep)}
    least = min(ep for ep in best if best[ep] >= 0.98 * max(best.values()))
    assert 64 <= least <= 160
    assert best[40] < 0.95 * best[least]


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("Llama-405B")])
def test_a_million_tokens_are_split_over_ranks(plans, name):
    decode = next(p for p in plans[name]["pools"] if p["role"] in ("serve", "decode"))
    assert decode["kvp"] > 1
    assert decode["tp"] <= 8  # no further than its KV heads


def test_attention_on_h20_and_experts_on_l40s_win_per_price(plans):
    roles = {pool["role"]: pool["machine"] for pool in plans["Mixtral-8x22B per price"]["pools"]}
    assert roles["attention"] == "h20"
    assert roles["experts"] == "l40s"


if __name__ == "__main__":
    PATH.write_text(json.dumps({name: plan(case) for name, case in CASES.items()}, indent=1) + "\n")
