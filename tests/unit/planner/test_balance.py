"""The whole of balancing: policies judged on loads, copies priced, dumps checked, loads compared."""

import json
from dataclasses import replace

import numpy as np
import pytest

from moesaic.errors import ConfigError
from moesaic.interop.dump import Dump, match_model
from moesaic.placement.contiguous import contiguous
from moesaic.placement.grid import SlotGrid
from moesaic.placement.slots import Placement
from moesaic.planner.balance import Case, balance, compare, formulas
from moesaic.planner.balance_answer import as_json, diff_json
from moesaic.planner.balance_check import check_dump
from moesaic.spec.families import read_config
from moesaic.spec.locate import locate

RNG = np.random.default_rng(0)


def dump(counts, name="a.json", **more):
    return Dump(source=name, layout="JSON counts", counts_LE=np.asarray(counts, float), num_steps=1, **more)


def loads(num, layers=3, experts=16):
    base = RNG.pareto(1.0, (layers, experts)) + 0.2
    return [dump(np.rint(base * RNG.uniform(0.7, 1.3, base.shape) * 2000), f"{i}.json") for i in range(num)]


@pytest.fixture(scope="module")
def mixtral():
    return read_config(locate("mixtral-8x7b").config, name="mixtral-8x7b")


def test_formulas_of_the_three_engines():
    found = formulas(np.array([[1.0, 1.0, 1.0, 5.0]]))
    assert (found.vllm, found.sglang, found.trtllm) == pytest.approx((0.4, 0.4, 1.5), abs=1e-5)
    two = formulas(np.array([[1.0, 1.0, 1.0, 5.0], [100.0, 100.0, 100.0, 100.0]]))
    assert two.vllm == pytest.approx(102 / 105)  # heavy layers weigh more
    assert two.sglang == pytest.approx(0.7, abs=1e-5)  # every layer as much


def test_every_policy_that_fits_and_robust_for_two_loads():
    one, two, other = loads(3)
    found = balance(Case(dumps=(one,), num_gpus=4, num_slots=20))
    assert [out.name for out in found.outcomes] == [
        "contiguous",
        "lpt",
        "eplb",
        "megascale",
        "slices",
        "search",
    ]
    assert found.chosen == "search"
    assert "two loads" in found.unfit["robust"]
    lines = []
    both = balance(
        Case(dumps=(one, two), holdouts=(other,), num_gpus=4, num_slots=20, num_nodes=2, num_groups=4),
        lines.append,
    )
    assert {"eplb-hierarchical", "robust"} <= {out.name for out in both.outcomes}
    assert both.chosen == "robust"
    assert lines[-1] == "robust: 3 of 3 layers"
    robust, plain = both.outcome("robust"), both.outcome("contiguous")
    assert robust.on_load_min > plain.on_load_min
    assert robust.holdout_mean > plain.holdout_mean
    assert robust.on_load_solved >= robust.on_load - 1e-9
    assert robust.same_rank_replicas == 0
    assert 0 < robust.local_share <= 1


def test_json_has_the_keys_that_scripts_read():
    one, other = loads(2)
    found = as_json(balance(Case(dumps=(one,), holdouts=(other,), num_gpus=4)))
    assert json.loads(json.dumps(found)) == found
    for values in found["policies"].values():
        wanted = {"on_load", "holdout_mean", "holdout_min", "seconds", "move_bytes", "same_rank_replicas"}
        assert wanted <= set(values)
    assert found["policies"]["contiguous"]["on_load"] == pytest.approx(
        np.mean([layer_even(one, found["policies"], i) for i in range(3)])
    )
    assert [row["layer"] for row in found["layers"]] == [0, 1, 2]
    assert np.mean(found["layers"][0]["after"]) == pytest.approx(1.0, abs=1e-5)


def layer_even(load, policies, layer):
    row = load.counts_LE[layer].reshape(4, 4).sum(axis=1)
    return row.mean() / row.max()


def test_all_zero_layers_are_dense_and_outside():
    load = dump(np.concatenate([np.zeros((2, 8)), RNG.integers(1, 99, (3, 8))]))
    found = balance(Case(dumps=(load,), num_gpus=4, policies=("contiguous", "lpt")))
    assert found.layer_idxs == (2, 3, 4)
    assert as_json(found)["dense_layers"] == 2
    row = load.counts_LE[2:].reshape(3, 4, 2).sum(axis=2)
    assert found.outcome("contiguous").on_load == pytest.approx((row.mean(axis=1) / row.max(axis=1)).mean())


def test_copies_are_priced_in_memory_and_moves(mixtral):
    load = dump(RNG.integers(100, 900, (32, 8)))
    case = Case(
        dumps=(match_model(load, mixtral),), model=mixtral, num_gpus=8, num_slots=16, context=1024,
        policies=("contiguous", "lpt"),
    )  # fmt: skip
    found = balance(case)
    expert = 3 * 4096 * 14336 * 2
    assert found.memory.slot_bytes == 32 * expert
    assert found.memory.redundant_bytes == 32 * expert
    assert found.memory.sequence_bytes == 1024 * 131072
    assert found.memory.sequences_lost == 32 * expert // (1024 * 131072)
    one = found.outcome("lpt")
    assert one.move_bytes == one.num_moves * expert
    assert found.outcome("contiguous").num_moves == 0
    assert one.receive_skew >= 1.0


def test_slices_move_parts_and_need_no_more_bytes_than_whole_experts_they_are_of(mixtral):
    load = match_model(dump(RNG.integers(100, 900, (32, 8))), mixtral)
    found = balance(Case(dumps=(load,), model=mixtral, num_gpus=16, num_slots=8, policies=("slices",)))
    one = found.outcome("slices")
    assert one.placement.ids_LGC.shape == (32, 16, 1)
    assert one.move_bytes == one.num_moves * 3 * 4096 * 14336
    with pytest.raises(ConfigError, match="8 mod 16"):
        balance(Case(dumps=(load,), num_gpus=16, num_slots=8))


def test_current_plan_bounds_moves():
    one, two = loads(2)
    start = balance(Case(dumps=(one,), num_gpus=4, num_slots=20, policies=("search",)))
    current = start.outcome("search").placement
    case = Case(dumps=(two,), num_gpus=4, current=current, policies=("search",))
    free = balance(case)
    assert free.num_slots == 20
    few = balance(replace(case, max_moves=4)).outcome("search")
    stays = balance(replace(case, max_moves=0)).outcome("search")
    assert stays.num_moves == 0
    assert few.num_moves <= 4
    assert stays.on_load <= few.on_load <= free.outcome("search").on_load + 1e-3
    assert free.before.max() == pytest.approx(
        max((row / row.mean()).max() for row in current.gpu_load(two.counts_LE)), rel=1e-6
    )


def test_current_plans_that_do_not_belong():
    (one,) = loads(1)
    short = Placement(ids_LGC=np.tile(np.arange(12).reshape(1, 4, 3), (3, 1, 1)))
    with pytest.raises(ConfigError, match="lacks expert 12 in sparse layer 0"):
        balance(Case(dumps=(one,), num_gpus=4, current=short))
    grid = SlotGrid(num_experts=16, num_gpus=4, num_slots=16)
    with pytest.raises(ConfigError, match="2 layers on 4 GPUs, the load 3 sparse layers"):
        balance(Case(dumps=(one,), num_gpus=4, current=contiguous(grid, 2)))


def test_slots_are_rounded_only_when_asked_or_not_given():
    load = dump(RNG.integers(1, 99, (2, 16)))
    assert balance(Case(dumps=(load,), num_gpus=3, policies=("lpt",))).num_slots == 18
    with pytest.raises(ConfigError, match=r"17 mod 3 = 2.*--round takes 18"):
        balance(Case(dumps=(load,), num_gpus=3, num_slots=17, policies=("lpt",)))
    rounded = Case(dumps=(load,), num_gpus=3, num_slots=17, is_rounded=True, policies=("lpt",))
    assert balance(rounded).num_slots == 18
    with pytest.raises(ConfigError, match="gpus must be at least 1, got 0"):
        Case(dumps=(load,), num_gpus=0)


def test_loads_must_be_of_one_model(mixtral):
    one = dump(RNG.integers(1, 9, (3, 8)))
    with pytest.raises(ConfigError, match="count in different layers: 3 and 2 of them, layer 2 in one only"):
        balance(Case(dumps=(one, dump(one.counts_LE[:2], "b.json")), num_gpus=4))
    with pytest.raises(ConfigError, match="6 experts, the model has 8"):
        match_model(dump(np.ones((32, 6))), mixtral)
    with pytest.raises(ConfigError, match="3 layers; the model has 32"):
        match_model(one, mixtral)


def test_dense_layers_of_the_model_must_count_nothing():
    deepseek = read_config(locate("deepseek-v3").config, name="deepseek-v3")
    counts = np.ones((61, 256))
    with pytest.raises(ConfigError, match="layer 0 has counts, and in the model it has no experts"):
        match_model(dump(counts), deepseek)
    counts[:3] = 0
    assert match_model(dump(counts), deepseek).sparse_layers == tuple(range(3, 61))
    assert match_model(dump(counts[3:]), deepseek).sparse_layers == tuple(range(3, 61))


# --- check --------------------------------------------------------------------------------------------------


def kinds(load, level="fault", model=None):
    return {one.kind for one in check_dump(load, model) if one.level == level}


def sound():
    """Four layers in which 20,000 tokens choose 2 of 16."""
    scores = np.random.default_rng(5).gumbel(size=(4, 20000, 16)) + np.random.default_rng(6).normal(
        size=(4, 1, 16)
    )
    ids = np.argsort(-scores, axis=2)[:, :, :2]
    return np.stack([np.bincount(layer.ravel(), minlength=16) for layer in ids]).astype(float)


def test_a_sound_dump_has_no_fault():
    assert kinds(dump(sound(), top_k=2)) == set()
    assert kinds(dump(sound(), top_k=2), "note") == {"skew"}


def spoilt(**change):
    return dump(change.pop("counts", sound()), **{"top_k": 2, **change})


@pytest.mark.parametrize(
    ("load", "kind"),
    [
        (spoilt(counts=np.zeros((4, 16))), "all zero"),
        (spoilt(counts=sound() * [[1], [1], [2], [1]]), "unequal layers"),
        (spoilt(counts=sound() + np.eye(16)[0]), "wrong top-k"),
        (spoilt(counts=np.full((4, 16), 2500.0)), "constant layers"),
        (spoilt(counts=np.repeat(sound()[:1], 4, axis=0)), "repeated layers"),
        (spoilt(counts=sound() * (np.arange(16) // 4 != 2)), "missing rank"),
        (spoilt(ranks=(0, 1, 3)), "missing rank"),
        (spoilt(ranks=(0, 1), short_ranks=(1,)), "short rank"),
        (spoilt(counts=sound() + 90000 * (np.arange(16) < 2)), "padding"),
    ],
)
def test_what_makes_a_dump_unsound_is_named(load, kind):
    assert kind in kinds(load)


def test_warnings_and_notes():
    few = np.random.default_rng(0).multinomial(64, np.ones(16) / 16, 4).astype(float)
    assert {"few samples", "dead experts"} <= kinds(dump(few), "warning")
    assert "unequal layers" in kinds(dump(sound() * [[1], [1], [1.001], [1]]), "warning")
    read = dump(sound(), num_zero_steps=3, num_padded=7, notes=("slots were added up",))
    assert {"zero steps", "padding", "reading"} <= kinds(read, "note")
    assert "dense layers" in kinds(dump(np.concatenate([np.zeros((1, 16)), sound()])), "note")


def test_messages_count_as_one_speaks():
    counts = sound()
    counts[2, 5] = 0
    said = [one.message for one in check_dump(dump(counts, num_padded=1))]
    assert "1 entry is no choice (padding) and was left out" in said
    assert f"1 of {counts.size} experts never chosen, in 1 of 4 layers" in said


def test_a_model_shows_truncated_choices_and_silent_layers():
    deepseek = read_config(locate("deepseek-v3").config, name="deepseek-v3")
    counts = np.zeros((61, 256))
    counts[4:] = np.random.default_rng(0).integers(500, 900, (57, 256))
    found = match_model(dump(counts, columns=6), deepseek)
    assert {"truncated top-k", "silent layers"} <= kinds(found, model=deepseek)


def test_a_record_counted_several_times_shows():
    eightfold = replace(dump(sound() * 8, num_tokens=20000, top_k=2), layout="moesaic load")
    assert "wrong top-k" in kinds(eightfold)
    assert kinds(replace(eightfold, counts_LE=sound())) == set()


# --- difference ---------------------------------------------------------------------------------------------


def test_difference_names_what_shifted_and_what_it_costs():
    before, after = np.full((2, 16), 100.0), np.full((2, 16), 100.0)
    before[:, 0] += 700
    after[0, 0] += 700
    after[1, 9] += 700
    case = Case(dumps=(dump(before), dump(after, "b.json")), num_gpus=4, num_slots=20)
    found = compare(case)
    assert found.distance == pytest.approx(700 / 2300 / 2)
    assert (found.distance_max_layer, found.shifts[0].layer_idx) == (1, 1)
    assert {one.expert for one in found.shifts[:2]} == {0, 9}
    assert found.old_on_old > 0.9
    assert found.old_on_new < 0.8 < 0.9 < found.new_on_new
    assert found.loss == pytest.approx(found.new_on_new / found.old_on_new - 1)
    assert diff_json(found)["loss"] == found.loss
    same = compare(replace(case, dumps=(case.dumps[0], case.dumps[0])))
    assert (same.distance, same.loss) == (0.0, pytest.approx(0.0))


def test_picture_and_page_show_both_sides():
    pytest.importorskip("matplotlib")
    from moesaic.planner.balance_report import page, picture

    one, other = loads(2)
    found = balance(
        Case(dumps=(one,), holdouts=(other,), num_gpus=4, num_slots=20, policies=("contiguous", "search"))
    )
    svg = picture(found)
    assert svg.startswith("<svg")
    for words in ("before", "after", "Policies", "search"):
        assert words in svg
    assert "a &lt; b" in page("t", "a < b", found)
