from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import ConfigError
from moesaic.spec.codec import to_plain
from moesaic.spec.deployment import (
    Deployment,
    ExpertTier,
    Grid,
    Instance,
    Interval,
    KvAffinity,
    KvTier,
    Layout,
    LoadAffinity,
    Prediction,
    PrefixAffinity,
    RoundRobin,
    TierPlan,
    from_json,
    json_schema,
    single_process,
)
from moesaic.spec.experts import ExpertPlan, contiguous_plan
from moesaic.spec.numerics import FormatMap, FormatPair, Numerics, preset

NUMERICS = preset("portable", dtype="bfloat16")
PLAN = contiguous_plan((4, 4), 1)
ONE = single_process("digest", NUMERICS, PLAN)


def layout(**changes: Any) -> Layout:
    facts: dict[str, Any] = {
        "attention": Grid(axes={"dp": 2, "tp": 2}, ranks=(0, 1, 2, 3)),
        "experts": Grid(axes={"ep": 4}, ranks=(0, 1, 2, 3)),
        "dispatcher": "exchange",
    }
    return Layout(**{**facts, **changes})


def with_layout(found: Layout, numerics: Numerics = NUMERICS) -> Deployment:
    plan = contiguous_plan((8,), len(found.experts.ranks))
    return replace(ONE, numerics=numerics, instances=(replace(ONE.instances[0], layout=found, plan=plan),))


# --- round trip
# ---------------------------------------------------------------------------------------------------

sizes = st.integers(1, 4)


@st.composite
def plans(draw: st.DrawFn, num_ranks: int) -> ExpertPlan:
    layers = draw(st.lists(st.integers(0, 5), max_size=3))
    ranks = st.integers(0, num_ranks - 1)

    def arrays(values: st.SearchStrategy[Any], dtype: type) -> tuple[Any, ...]:
        return tuple(
            np.array(draw(st.lists(values, min_size=size, max_size=size)), dtype=dtype) for size in layers
        )

    return ExpertPlan(
        version=draw(st.integers(0, 9)),
        slot_rank=arrays(ranks, np.int64),
        slot_expert=arrays(st.integers(0, 99), np.int64),
        slot_slice=arrays(st.integers(0, 3), np.int64),
        slot_share=arrays(st.floats(0, 1), np.float64),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp, kvp, tp = draw(sizes), draw(st.sampled_from([1, 2, 4])), draw(sizes)
    count = dp * kvp * tp
    is_split = draw(st.booleans())
    first = count if is_split else 0
    num_experts = draw(sizes) if is_split else count
    kinds = ["local"] if count + first == 1 else ["exchange", "gathered", "two_level", "shared_memory"]
    dispatcher = draw(st.sampled_from(["remote"] if is_split else kinds))
    return Layout(
        attention=Grid(axes={"dp": dp, "kvp": kvp, "tp": tp}, ranks=tuple(range(count))),
        experts=Grid(axes={"ep": num_experts}, ranks=tuple(range(first, first + num_experts))),
        dispatcher=dispatcher,
        ranks_per_node=1 if dispatcher == "two_level" else draw(st.sampled_from([None, 1, 8])),
        returns=draw(st.sampled_from(["choices", "subtrees"])),
        pipeline=draw(sizes),
        num_micro_batches=draw(sizes),
        num_chunks=1 if dispatcher == "local" else draw(sizes),
    )


@st.composite
def instances(draw: st.DrawFn, name: str) -> Instance:
    found = draw(layouts())
    budgets = st.integers(1, 10**12)
    return Instance(
        name=name,
        phases=draw(st.frozensets(st.sampled_from(["prefill", "decode"]), min_size=1)),
        count=draw(sizes),
        machines={"attention": draw(st.text(max_size=5)), "expert": "h100"},
        layout=found,
        plan=draw(plans(len(found.experts.ranks))),
        tiers=TierPlan(
            experts=tuple(
                ExpertTier(place="host", budget_bytes=draw(budgets)) for _ in range(draw(sizes) // 3)
            ),
            kv=tuple(KvTier(place="peer", budget_bytes=draw(budgets)) for _ in range(draw(sizes) // 3)),
        ),
    )


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    pair = FormatPair(weight="float32", activation="bfloat16")
    formats = draw(
        st.dictionaries(st.tuples(st.integers(0, 9), st.integers(0, 9)), st.just(pair), max_size=2)
    )
    numerics = replace(
        NUMERICS.with_leaves(matmul_shards=8, kv_lanes=4),
        formats=FormatMap(default=NUMERICS.formats.default, by_expert=formats),
        backend=draw(st.sampled_from(["reference", "external"])),
    )
    routes = [
        RoundRobin(),
        PrefixAffinity(num_blocks=draw(sizes)),
        KvAffinity(least_hit=draw(st.floats(0, 1))),
        LoadAffinity(load_weight=draw(st.floats(0, 9))),
    ]
    interval = Interval(low=1.0, high=draw(st.floats(1, 100)))
    prediction = Prediction(tokens_per_s=interval, ttft_s=interval, tpot_s=interval, source="modelled")
    return Deployment(
        model_digest=draw(st.text(min_size=1, max_size=5)),
        numerics=numerics,
        instances=tuple(draw(instances(f"i{i}")) for i in range(draw(st.integers(1, 2)))),
        route=draw(st.sampled_from(routes)),
        predicted=draw(st.sampled_from([None, prediction])),
    )


@settings(max_examples=60)
@given(deployments())
def test_round_trip_through_json(found: Deployment) -> None:
    text = found.to_json()
    assert json.loads(text) == to_plain(found)
    again = from_json(text)
    assert again.to_json() == text
    assert again.digest() == found.digest()
    assert again.numerics == found.numerics
    assert again.numerics.digest() == found.numerics.digest()
    assert again.route == found.route
    assert again.not_runnable() == found.not_runnable()
    jsonschema_rs.validate(json_schema(), json.loads(text))


def test_an_array_of_numbers_takes_one_line() -> None:
    assert '"slot_rank": [\n          [0, 0, 0, 0]' in ONE.to_json()
    strange = replace(ONE, model_digest="[\n 1,\n 2\n]")
    assert from_json(strange.to_json()).model_digest == strange.model_digest


def test_digest_ignores_key_order_and_blanks() -> None:
    data = json.loads(ONE.to_json())
    shuffled = json.dumps(dict(reversed(data.items())))
    assert from_json(shuffled).digest() == ONE.digest()
    assert replace(ONE, model_digest="other").digest() != ONE.digest()


# --- reading
# ------------------------------------------------------------------------------------------------------


def edited(path: str, value: Any) -> str:
    """The JSON of `ONE` with the value at a dotted path replaced."""
    data = json.loads(ONE.to_json())
    *parents, last = path.split(".")
    place = data
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (
            "instances.0.layout.dispatchers",
            "local",
            r"unknown key instances\[0\].layout.dispatchers; did you mean",
        ),
        ("instances.0.layout.dispatcher", "locall", r"layout.dispatcher must be one of 'local', 'gathered'"),
        (
            "instances.0.layout.pipeline",
            "1",
            r"instances\[0\].layout.pipeline must be a whole number, got '1'",
        ),
        ("instances.0.layout.pipeline", True, "must be a whole number, got True"),
        ("instances.0.layout.pipeline", 0, "pipeline must be at least 1, got 0"),
        (
            "instances.0.layout.attention.axes",
            {"pp": 1},
            r"attention.axes.pp must be one of 'dp', 'kvp', 'tp', 'ep'",
        ),
        ("instances.0.layout.attention.axes", {"tp": 2}, r"tp 2 = 2, but there are 1 ranks"),
        ("instances.0.layout.experts.axes", {"dp": 1}, "experts has no axis dp"),
        (
            "instances.0.plan.slot_rank",
            [[0, 0, 0, 9], [0] * 4],
            "layer 0 of a plan names rank 9, but there are 1",
        ),
        (
            "instances.0.plan.slot_rank",
            [[0, 0.5, 0, 0], [0] * 4],
            r"slot_rank\[0\]\[1\] must be a whole number",
        ),
        (
            "instances.0.plan.slot_expert",
            [[0], [0] * 4],
            "layer 0 of a plan must have the same number of slots",
        ),
        (
            "instances.0.plan.slot_slice",
            [],
            "same number of layers: slot_rank 2, slot_expert 2, slot_slice 0",
        ),
        ("instances.0.plan.slot_expert", [[-1, 0, 0, 0], [0] * 4], "negative"),
        ("instances.0.plan.slot_expert", [[2**70, 0, 0, 0], [0] * 4], "64 bits"),
        ("instances.0.machines", {"attention": "x"}, "machines must name one for each role; expert has none"),
        ("instances.0.phases", [], "at least one of the phases"),
        ("instances", [], "at least one instance"),
        ("numerics.kv_lanes", 3, "numerics: numerics.kv_lanes must be a power of two, got 3"),
        ("route", {"kind": "round_robbin"}, "route.kind must be one of 'round_robin', 'prefix_affinity'"),
        ("route", {"num_blocks": 2}, "route.kind must be one of"),
        ("route", {"kind": "round_robin", "num_blocks": 2}, "unknown key route.num_blocks"),
        ("predicted", {"ttft_s": 1}, "predicted.tokens_per_s is missing; a Prediction needs it"),
        ("schema_version", 2, "schema_version is 2, this build reads 1"),
        ("model_digest", None, "model_digest must be a string, got None"),
    ],
)
def test_errors_name_the_place(path: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        from_json(edited(path, value), name="d.json")
    assert str(caught.value).startswith("d.json: ")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "nan", b"\xff", "3"])
def test_damaged_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ConfigError):
        from_json(text)


def test_numbers_that_json_cannot_hold_are_refused() -> None:
    text = ONE.to_json().replace('"slot_share": [\n          [1.0', '"slot_share": [\n          [NaN')
    assert "NaN" in text
    with pytest.raises(ConfigError, match="finite"):
        from_json(text)


def test_schema_refuses_what_the_reader_refuses() -> None:
    schema = json_schema()
    assert jsonschema_rs.meta.is_valid(schema)
    validator = jsonschema_rs.Draft202012Validator(schema)
    assert validator.is_valid(json.loads(ONE.to_json()))
    for path, value in (
        ("route", {"kind": "no"}),
        ("instances.0.layout.dispatchers", 1),
        ("model_digest", 3),
    ):
        assert not validator.is_valid(json.loads(edited(path, value)))


def test_absent_fields_take_their_defaults() -> None:
    data = json.loads(ONE.to_json())
    for key in ("route", "predicted", "schema_version"):
        del data[key]
    del data["instances"][0]["tiers"]
    assert from_json(json.dumps(data)).digest() == ONE.digest()


# --- layouts
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": Grid(axes={"ep": 2}, ranks=(0, 1))}, "the same ranks or none in common"),
        ({"dispatcher": "local"}, "dispatcher local sends nothing, so it has one rank; this layout has 4"),
        ({"dispatcher": "remote"}, "experts on ranks of their own"),
        ({"is_fused": True}, "a fused layer is one native call; what exchange sends, Python hands over"),
        ({"num_micro_batches": 0}, "num_micro_batches must be at least 1"),
        ({"num_chunks": 0}, "num_chunks must be at least 1, got 0"),
        (
            {"num_chunks": 2, "dispatcher": "shared_memory", "is_fused": True},
            "a fused layer sends its rows at once",
        ),
        ({"ranks_per_node": 0}, "ranks_per_node must be at least 1, got 0"),
        ({"dispatcher": "two_level"}, "several nodes, got ranks_per_node = None and num_ranks = 4"),
        ({"dispatcher": "two_level", "ranks_per_node": 4}, "set how many ranks share a node, or use exch"),
    ],
)
def test_contradictory_layouts_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layout(**changes)


def test_grids_show_their_arithmetic() -> None:
    with pytest.raises(ConfigError, match="dp 2 x tp 3 = 6, but there are 4 ranks"):
        Grid(axes={"dp": 2, "tp": 3}, ranks=(0, 1, 2, 3))
    with pytest.raises(ConfigError, match="ranks must be different"):
        Grid(axes={"tp": 2}, ranks=(1, 1))
    with pytest.raises(ConfigError, match="axis dp must be at least 1, got 0"):
        Grid(axes={"dp": 0}, ranks=())


def test_split_layout() -> None:
    found = layout(experts=Grid(axes={"ep": 2}, ranks=(4, 5)), dispatcher="remote")
    assert found.is_split
    assert found.num_ranks == 6
    assert not layout().is_split


def test_a_layout_needs_leaves_to_split_a_sum() -> None:
    with pytest.raises(
        ConfigError, match=r"tp 2 splits a matmul further than its 1 leaves; .* matmul_shards = 2"
    ):
        with_layout(layout())
    assert with_layout(layout(), NUMERICS.with_leaves(matmul_shards=2))
    three = layout(
        attention=Grid(axes={"tp": 3}, ranks=(0, 1, 2)), experts=Grid(axes={"ep": 3}, ranks=(0, 1, 2))
    )
    with pytest.raises(ConfigError, match="matmul_shards = 4"):
        three.check_numerics(NUMERICS)
    three.check_numerics(NUMERICS.with_leaves(matmul_shards=8))


def test_kvp_divides_the_lanes() -> None:
    def kvp(size: int) -> Layout:
        ranks = tuple(range(size))
        return layout(
            attention=Grid(axes={"kvp": size}, ranks=ranks), experts=Grid(axes={"ep": size}, ranks=ranks)
        )

    kvp(2).check_numerics(NUMERICS)
    with pytest.raises(
        ConfigError, match=r"kvp 8 must divide kv_lanes .4.; 4 mod 8 = 4; .* kv_lanes = 8 allow it"
    ):
        kvp(8).check_numerics(NUMERICS)
    with pytest.raises(ConfigError, match=r"4 mod 3 = 1$"):
        kvp(3).check_numerics(NUMERICS)


# --- what runs
# ----------------------------------------------------------------------------------------------------


def test_one_process_runs() -> None:
    assert ONE.not_runnable() == ()
    assert ONE.instances[0].layout.num_ranks == 1


def test_every_field_that_does_not_run_is_named() -> None:
    two_copies = replace(
        PLAN,
        slot_rank=(np.zeros(5, np.int64), PLAN.slot_rank[1]),
        slot_expert=(np.array([0, 1, 2, 3, 3]), PLAN.slot_expert[1]),
        slot_slice=(np.zeros(5, np.int64), PLAN.slot_slice[1]),
        slot_share=(np.ones(5), PLAN.slot_share[1]),
    )
    sliced = replace(PLAN, slot_slice=(np.array([0, 0, 0, 1]), PLAN.slot_slice[1]))
    one = ONE.instances[0]
    alone = one.layout
    cases: dict[str, Deployment] = {
        "instances": replace(ONE, instances=(one, replace(one, name="b"))),
        "instances[0].count": replace(ONE, instances=(replace(one, count=2),)),
        "instances[0].phases": replace(ONE, instances=(replace(one, phases=frozenset({"decode"})),)),
        "instances[0].layout.attention.kvp": with_layout(two(attention={"kvp": 2})),
        "instances[0].layout.experts.tp": with_layout(
            two(experts={"tp": 2}), NUMERICS.with_leaves(matmul_shards=2)
        ),
        "instances[0].layout.attention.ranks": with_layout(two(attention_ranks=(1, 0))),
        "instances[0].layout.experts.ranks": with_layout(two(expert_ranks=(1, 0))),
        "instances[0].layout.dispatcher": with_layout(two(dispatcher="gathered")),
        "instances[0].layout.pipeline": with_layout(replace(alone, pipeline=2)),
        "instances[0].layout.is_fused": with_layout(replace(alone, is_fused=True)),
        "instances[0].tiers.experts": replace(
            ONE,
            instances=(replace(one, tiers=TierPlan(experts=(ExpertTier(place="host", budget_bytes=1),))),),
        ),
        "instances[0].tiers.kv": replace(
            ONE, instances=(replace(one, tiers=TierPlan(kv=(KvTier(place="disk", budget_bytes=1),))),)
        ),
        "instances[0].plan.slot_expert": replace(ONE, instances=(replace(one, plan=two_copies),)),
        "instances[0].plan.slot_slice": replace(ONE, instances=(replace(one, plan=sliced),)),
        "numerics.backend": replace(ONE, numerics=replace(NUMERICS, backend="external")),
        "numerics.combine": replace(ONE, numerics=replace(NUMERICS, combine="per_rank")),
    }
    for wrong in (replace(alone, returns="subtrees"), replace(alone, dispatcher="exchange")):
        (reason,) = with_layout(wrong).not_runnable()
        assert str(reason).startswith("instances[0].layout.dispatcher = ")
    for path, found in cases.items():
        assert path in {reason.path for reason in found.not_runnable()}
    assert str(cases["instances[0].count"].not_runnable()[0]).startswith("instances[0].count = 2: ")


def test_ranks_with_requests_of_their_own_run_with_every_dispatcher_that_is_built() -> None:
    for right in (
        two(),
        two(returns="subtrees"),
        two(num_micro_batches=3),
        two(num_chunks=3),
        two(dispatcher="two_level", ranks_per_node=1),
        replace(ONE.instances[0].layout, num_micro_batches=2),
    ):
        assert with_layout(right).not_runnable() == ()
    leaves = NUMERICS.with_leaves(matmul_shards=2)
    for right in (two(attention={"tp": 2}), two(attention={"tp": 2}, dispatcher="gathered")):
        assert with_layout(right, leaves).not_runnable() == ()
    for experts in ({"tp": 2}, {"ep": 2}):  # a grid says it, or the plan alone
        found = with_layout(two(experts=experts), leaves)
        cut = replace(found.instances[0], plan=contiguous_plan((4, 4), 2, 2))
        assert replace(found, instances=(cut,)).not_runnable() == ()
    fused = replace(cut, layout=two(dispatcher="shared_memory", is_fused=True))
    native = replace(leaves, backend="native/avx2")
    (reason,) = replace(found, numerics=native, instances=(fused,)).not_runnable()
    assert reason.path == "instances[0].layout.is_fused"


def two(
    attention: Any = None,
    experts: Any = None,
    attention_ranks: tuple[int, ...] = (0, 1),
    expert_ranks: tuple[int, ...] = (0, 1),
    **others: Any,
) -> Layout:
    return Layout(
        attention=Grid(axes=attention or {"dp": 2}, ranks=attention_ranks),
        experts=Grid(axes=experts or {"ep": 2}, ranks=expert_ranks),
        **({"dispatcher": "exchange"} | others),
    )


def test_tiers_need_a_budget_and_intervals_go_up() -> None:
    with pytest.raises(ConfigError, match="budget_bytes above 0"):
        TierPlan(kv=(KvTier(place="host", budget_bytes=0),))
    with pytest.raises(ConfigError, match="an interval goes up"):
        Interval(low=2.0, high=1.0)
    with pytest.raises(ConfigError, match="all is there twice"):
        replace(ONE, instances=(ONE.instances[0], ONE.instances[0]))
