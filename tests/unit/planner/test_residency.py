"""Plans with experts in host memory or on disk: equal to a scan, and only where nothing else will do."""

import numpy as np
import pytest

from moesaic.cost.layouts import Split, memory_per_rank, step_cost
from moesaic.cost.offload import tiers
from moesaic.cost.ops import Work
from moesaic.cost.profile import PAPER
from moesaic.cost.serving import Interference, prefill_beside_decode
from moesaic.cost.term import step_seconds
from moesaic.errors import CapacityError, ConfigError
from moesaic.planner.answer import as_json
from moesaic.planner.demand import Demand
from moesaic.planner.deployment import deployment_of
from moesaic.planner.load_file import skewed
from moesaic.planner.question import clusters_of, format_choices
from moesaic.planner.residency import offloaded_blocks
from moesaic.planner.search import Question, search
from moesaic.planner.sensitivity import FACTORS, sensitivities
from moesaic.planner.space import blocks
from moesaic.spec.deployment import from_json
from moesaic.spec.families import read_config
from moesaic.spec.locate import locate


def question(name, machine, pins=None, **asked):
    spec = read_config(locate(name).config, name=name)
    return Question(
        model=spec, clusters=clusters_of([machine], ()), demand=Demand(**{"isl": 1000, "osl": 500, **asked}),
        profile="paper", shares=skewed(spec), choices=format_choices(spec, "stored", "bfloat16", None),
        pins=pins or {},
    )  # fmt: skip


def test_search_equals_a_scan_over_every_layout_batch_and_number_of_experts():
    asked = question("mixtral-8x7b", "rtx-4090x2", tpot_s=1.0)
    demand, cards, best = asked.demand, asked.clusters[0], 0.0
    for tp, dp, ep, off in [
        (heads, replicas, spread, outside)
        for heads, replicas in ((1, 1), (2, 1), (1, 2))
        for spread in range(1, heads * replicas + 1)
        for outside in range(1, 9)
        if spread <= max(8 - outside, 1)
    ]:
        split = Split(tp=tp, dp=dp, ep=ep, expert_tp=tp * dp // ep, num_offloaded=off)
        batch = np.arange(1.0, 600.0)
        memory = memory_per_rank(
            asked.model, split, num_seqs=batch, context=1500, max_rows=batch + 1000, profile=PAPER,
        )  # fmt: skip
        batch = batch[sum(memory.values()) <= 0.9 * cards.machine.memory_bytes]
        if not len(batch):
            continue
        common = {"profile": PAPER, "shares": asked.shares}
        step = step_cost(asked.model, cards, split, Work(num_seqs=batch, new_tokens=1, past=1250), **common)
        prompt = step_cost(
            asked.model, cards, split, Work(num_seqs=np.ones(1), new_tokens=1000, past=0), **common
        )
        beside = prefill_beside_decode(prompt, batch, Interference())
        own = np.where(batch > 1, beside, step_seconds(prompt).value) / 500
        tpot = step_seconds(step).value + (batch - 1) * own
        count = 2 // (tp * dp)
        best = max(best, np.where(tpot <= demand.tpot_s, batch * dp * count / (tpot + own), 0.0).max())
    found = search(asked)
    assert found.missed == ()
    assert found.best.tokens_per_s == pytest.approx(best, rel=1e-9)
    assert best > 0


def test_experts_leave_the_devices_only_where_nothing_else_will_do():
    whole = search(question("mixtral-8x7b", "h100x2", concurrency=8)).best
    assert whole.pools[0].residency is None
    assert whole.pools[0].layout["num_offloaded"] == 0
    partly = search(question("mixtral-8x7b", "rtx-4090x2", concurrency=1)).best
    held = partly.pools[0].residency
    assert held.device + held.host + held.disk == 8
    assert held.device > 0
    assert held.host == partly.pools[0].layout["num_offloaded"] > 0
    assert partly.bottleneck.startswith("expert load")


def test_a_disk_is_the_last_tier():
    held = search(question("deepseek-v3", "rtx-4090", concurrency=1)).best.pools[0].residency
    assert held.disk > held.host > 0
    with pytest.raises(CapacityError, match="experts in host memory or on disk do not help"):
        search(question("llama-3.1-405b", "rtx-4090"))


def test_room_on_the_hosts_is_shared_by_the_devices_of_a_node():
    asked = question("mixtral-8x22b", "rtx-4090x4")
    for block in offloaded_blocks(asked.model, asked.clusters[0], asked.choices, {}):
        held = tiers(asked.model, asked.clusters[0], block.columns["num_offloaded"], block.devices, None)
        assert np.all(np.asarray(held.missing) == 0)
        one_device = block.devices == 1
        assert np.all(np.asarray(held.host)[one_device] <= 256e9 * 0.9 / 4 / (56 * 604e6))


def test_the_file_and_the_json_say_where_experts_are():
    asked = question("qwen3-30b-a3b", "rtx-4090", pins={"num_offloaded": 96})
    answer = search(asked)
    text = deployment_of(answer.best, asked.model, None).to_json()
    (instance,) = from_json(text).instances
    (tier,) = instance.tiers.experts
    assert (tier.place, tier.budget_bytes) == ("host", 96 * 48 * 3 * 2048 * 768 * 2)
    assert any(reason.path == "instances[0].tiers.experts" for reason in from_json(text).not_runnable())
    (pool,) = as_json("model", asked, answer, ())["best"]["pools"]
    assert pool["experts"] == {
        "device": 32, "host": 96, "disk": 0, "local_share": pytest.approx(0.455, abs=0.01)
    }  # fmt: skip
    assert pool["layout"]["num_offloaded"] == 96


def test_other_rates_of_the_host():
    asked = question("qwen3-30b-a3b", "rtx-4090", concurrency=1)
    plan = search(asked).best
    found = {one.name: one for one in sensitivities(plan, asked)}
    host = found["host memory bandwidth"]
    assert host.tpot_s[FACTORS.index(1.0)] == pytest.approx(float(plan.tpot.value), rel=1e-9)
    assert list(host.tpot_s) == sorted(host.tpot_s, reverse=True)
    assert host.tpot_s[0] > 1.5 * host.tpot_s[-1]
    whole = question("qwen3-30b-a3b", "h100")
    assert "host memory bandwidth" not in {one.name for one in sensitivities(search(whole).best, whole)}


def test_more_ranks_than_experts_need_copies_or_slices():
    """Eight experts over sixteen ranks: refused as they are, two copies or halves of each are legal."""
    with pytest.raises(
        ConfigError, match=r"8 experts \+ 0 redundant = 8 slots / ep 16 .* redundant slots are 8"
    ):
        search(question("mixtral-8x7b", "h100x8x2", pins={"ep": 16, "num_redundant": 0}))
    for pins in ({"ep": 16, "num_redundant": 8}, {"ep": 8, "expert_tp": 2}, {"ep": 8}):
        assert search(question("mixtral-8x7b", "h100x8x2", pins=pins)).best.value > 0


def test_layouts_that_cannot_be_are_left_out():
    asked = question("mixtral-8x7b", "rtx-4090x2")
    args = asked.model, asked.clusters[0], asked.choices
    assert offloaded_blocks(*args, {"pp": 2}) == []
    with pytest.raises(CapacityError, match="experts outside the devices go with pp 1, kvp 1"):
        search(question("mixtral-8x7b", "rtx-4090x2", pins={"num_offloaded": 4, "pp": 2}))
    assert blocks(*args, {"num_offloaded": 3})[0] == []
    dense = question("llama-3.1-8b", "rtx-4090")
    assert offloaded_blocks(dense.model, dense.clusters[0], dense.choices, {}) == []
