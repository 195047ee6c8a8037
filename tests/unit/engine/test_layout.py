"""From wishes, files and ranks that were started to one layout; contradictions are refused with a way out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from moesaic.cli.main import build_app
from moesaic.engine.config import EngineConfig
from moesaic.engine.layout import (
    LayoutWish,
    Started,
    arrange,
    check_split,
    data_parallel,
    describe_layout,
    settle,
    tp_wires_of,
)
from moesaic.engine.rank import arrange_for
from moesaic.errors import ConfigError, KernelUnavailable
from moesaic.hashing import digest
from moesaic.kernels.ops import choose
from moesaic.models.build import read_spec
from moesaic.spec.codec import to_plain
from moesaic.spec.deployment import Deployment, single_process
from moesaic.spec.experts import contiguous_plan
from moesaic.spec.locate import locate
from moesaic.spec.numerics import Numerics, preset

SPEC = read_spec(locate("demo").weights_folder())
COUNTS = tuple(moe.num_experts for _, moe in SPEC.moe_layers)
NUMERICS = preset("portable", dtype="bfloat16")
TORCHRUN = Started(num_ranks=4, ranks_per_node=2)


def deployment(num_ranks: int = 2, numerics: Numerics = NUMERICS, **layout: Any) -> Deployment:
    one = single_process(digest(SPEC), numerics, contiguous_plan(COUNTS, 1))
    found = data_parallel(num_ranks, **layout)
    plan = contiguous_plan(COUNTS, num_ranks)
    return replace(one, instances=(replace(one.instances[0], layout=found, plan=plan),))


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_what_is_not_stated_follows_from_the_number_of_ranks() -> None:
    assert (
        describe_layout(arrange(LayoutWish(), SPEC).layout)
        == "attention on one rank, experts on one rank, local"
    )
    found = arrange(LayoutWish(num_ranks=4, returns="subtrees", num_micro_batches=2), SPEC)
    assert describe_layout(found.layout) == (
        "attention dp 4, experts ep 4, shared_memory, returns subtrees, 2 micro-batches"
    )
    assert found.plan is None
    assert found.numerics is None


def test_layers_whose_rows_go_in_chunks_are_not_fused() -> None:
    whole, parts = (
        arrange(LayoutWish(num_ranks=2, num_chunks=count, dispatcher="shared_memory"), SPEC, is_native=True)
        for count in (None, 3)
    )
    assert describe_layout(whole.layout) == "attention dp 2, experts ep 2, shared_memory fused"
    assert describe_layout(parts.layout) == "attention dp 2, experts ep 2, shared_memory, 3 chunks"


def test_ranks_that_were_started_say_how_many_and_which_share_a_node() -> None:
    found = arrange(LayoutWish(dispatcher="two_level"), SPEC, TORCHRUN)
    assert (found.layout.num_ranks, found.layout.ranks_per_node) == (4, 2)
    with pytest.raises(ConfigError, match="--ranks is for 2 ranks, but WORLD_SIZE says 4: start 2"):
        arrange(LayoutWish(num_ranks=2), SPEC, TORCHRUN)


def test_a_deployment_says_layout_placement_and_numerics(tmp_path: Path) -> None:
    made = deployment(2, returns="subtrees", num_micro_batches=2)
    found = arrange(LayoutWish(deployment=written(tmp_path / "d.json", made.to_json())), SPEC)
    assert found.layout == made.instances[0].layout
    assert found.numerics == NUMERICS
    assert found.plan is not None
    for ours, theirs in zip(found.plan.slot_rank, made.instances[0].plan.slot_rank, strict=True):
        assert np.array_equal(ours, theirs)
    with pytest.raises(ConfigError, match=r"d\.json is for 2 ranks, but WORLD_SIZE says 4"):
        arrange(LayoutWish(deployment=str(tmp_path / "d.json")), SPEC, TORCHRUN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_digest": "other"}, "made for another model"),
        ({"instances": 2}, "instances = 2: several instances need the router"),
        ({"numerics": replace(NUMERICS, combine="per_rank")}, "numerics.combine = per_rank"),
        ({"plan": contiguous_plan((16,), 2)}, "it has 1 layers, the model has 5 with experts"),
        ({"plan": contiguous_plan(COUNTS, 1)}, "it is for 1 ranks, this engine has 2"),
        ({"plan": contiguous_plan((15,) * 5, 2)}, r"sparse layer 0 has no slot for experts \[15\]"),
    ],
)
def test_deployments_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    made = deployment()
    one = made.instances[0]
    if "plan" in change:
        made = replace(made, instances=(replace(one, plan=change["plan"]),))
    elif "instances" in change:
        made = replace(made, instances=(one, replace(one, name="b")))
    else:
        made = replace(made, **change)
    path = written(tmp_path / "d.json", made.to_json())
    with pytest.raises(ConfigError, match=message):
        arrange(LayoutWish(deployment=path), SPEC)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (
            {"num_ranks": 4, "dispatcher": "local"},
            "one rank, and there are 4: for 4 ranks there are exchange and",
        ),
        ({"num_ranks": 4, "dispatcher": "two_level"}, "no --ranks-per-node: ask for --ranks-per-node 1 to 3"),
        ({"num_ranks": 4, "dispatcher": "two_level", "ranks_per_node": 4}, "4 per node: ask for"),
        (
            {"num_ranks": 2, "dispatcher": "gathered"},
            "every rank must have every row: .* tp 1 and 2 ranks: ask for --tp 2 and as many --matmul-shards",
        ),
        ({"num_ranks": 2, "dispatcher": "two_level"}, "ask for --ranks-per-node 1, or use exchange"),
        (
            {"num_ranks": 2, "dispatcher": "remote"},
            r"remote does not run yet \(.* there are exchange and",
        ),
        ({"num_ranks": 17}, "17 ranks for 16 experts a layer: .* at most 16"),
        ({"num_ranks": 10**9}, "1000000000 ranks for 16 experts a layer: .* at most 16"),
        ({"num_ranks": 10**9, "expert_tp": 10**9}, "1000000000 slices of an expert that is .* wide"),
        ({"dispatcher": "exchange"}, "--dispatcher exchange is for several ranks, and there is one"),
        ({"returns": "subtrees"}, "--returns subtrees is for several ranks"),
        ({"ranks_per_node": 1}, "--ranks-per-node 1 is for several ranks"),
        ({"num_chunks": 2}, "--chunks 2 is for several ranks"),
        ({"num_chunks": 0, "num_ranks": 2}, "num_chunks must be a whole number of at least 1, got 0"),
        ({"dispatcher": "exchnge", "num_ranks": 2}, "dispatcher 'exchnge' is unknown; did you mean exchange"),
        ({"returns": "tree", "num_ranks": 2}, "returns 'tree' is unknown; .*subtrees"),
        ({"num_micro_batches": 0}, "num_micro_batches must be a whole number of at least 1, got 0"),
        ({"expert_tp": 2}, "--expert-tp 2 is for several ranks, and there is one"),
        (
            {"num_ranks": 5, "expert_tp": 2},
            r"5 mod 2 = 1; ask for --expert-tp 1, 5, or for --ranks 6",
        ),
        ({"num_ranks": 34, "expert_tp": 2}, "34 ranks for 16 experts a layer in 2 slices: .* at most 32"),
        (
            {"num_ranks": 2, "expert_tp": 2, "returns": "subtrees"},
            "returns subtrees does not run with experts in 2 slices: .*one by one.*leave --returns out",
        ),
        ({"num_ranks": 2, "expert_tp": 2, "placement": "p.json"}, "says which slices of experts there are"),
        ({"deployment": "d.json", "num_ranks": 2, "returns": "choices"}, "--ranks, --returns say it again"),
        ({"deployment": "absent.json"}, r"deployment absent\.json: cannot be read .*moesaic plan -o"),
    ],
)
def test_wishes_that_cannot_be_are_refused_with_a_way_out(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arrange(LayoutWish(**wish), SPEC)


def test_steps_are_cut_into_no_more_parts_than_they_have_tokens() -> None:
    for name, flag in (("num_micro_batches", "--micro-batches"), ("num_chunks", "--chunks")):
        config = EngineConfig.parse("m", {"num_ranks": 2, name: 10**6})
        with pytest.raises(ConfigError, match=rf"^{name} 1000000: .* up to 512 tokens .*\({flag}\)$"):
            arrange_for(config, SPEC, None)
    assert arrange_for(replace(config, max_tokens_per_step=10**6), SPEC, None).layout.num_chunks == 10**6


def test_slices_of_experts_over_groups_of_ranks(tmp_path: Path) -> None:
    """As many ranks as there are slices, no fused layers, and the leaves that they need."""
    found = arrange(LayoutWish(num_ranks=32, expert_tp=2), SPEC, is_native=True)
    assert describe_layout(found.layout) == "attention dp 32, experts ep 16 tp 2, shared_memory"
    assert found.plan is not None
    assert found.num_slices == 2
    assert np.array_equal(np.sort(found.plan.slot_rank[0]), np.arange(32))
    with pytest.raises(ConfigError, match=r"1 / 2 = 0\.5 leaves .* into 1; ask for --matmul-shards 2"):
        check_split(found.layout, SPEC, NUMERICS, 2)
    check_split(found.layout, SPEC, NUMERICS.with_leaves(matmul_shards=2), 2)
    with pytest.raises(ConfigError, match=r"4 / 3 = 1\.33333 leaves .* can be cut into 1, 2, 4$"):
        check_split(found.layout, SPEC, NUMERICS.with_leaves(matmul_shards=4), 3)
    fine = NUMERICS.with_leaves(matmul_shards=1 << 20)
    with pytest.raises(ConfigError, match=r"matmul_shards = 1048576 does not divide"):
        check_split(found.layout, SPEC, fine, 2)
    made = deployment(2, NUMERICS.with_leaves(matmul_shards=2), tp=2, expert_tp=2)
    cut = replace(made.instances[0], plan=contiguous_plan(COUNTS, 2, 2))
    path = written(tmp_path / "d.json", replace(made, instances=(cut,)).to_json())
    stated = arrange(LayoutWish(deployment=path), SPEC)
    assert (stated.layout.dispatcher, stated.num_slices) == ("gathered", 2)
    path = written(tmp_path / "d.json", made.to_json())
    with pytest.raises(ConfigError, match=r"layout\.experts\.tp = 2: the plan has 1 slices of an expert"):
        arrange(LayoutWish(deployment=path), SPEC)
    plan = replace(found.plan, slot_rank=tuple(ranks % 2 for ranks in found.plan.slot_rank))
    path = written(tmp_path / "plan.json", json.dumps(to_plain(plan)))
    given = arrange(LayoutWish(num_ranks=2, placement=path), SPEC, is_native=True)
    assert (given.num_slices, given.layout.is_fused) == (2, False)
    assert arrange(LayoutWish(placement=path), SPEC).layout.num_ranks == 2, "as many as the plan is for"
    lacking = replace(
        plan, slot_slice=tuple(np.where(plan.slot_expert[0] == 3, 0, one) for one in plan.slot_slice)
    )
    path = written(tmp_path / "lacking.json", json.dumps(to_plain(lacking)))
    with pytest.raises(
        ConfigError, match=r"no slot for slices \[1 of expert 3\]; .* each of their 2 slices once"
    ):
        arrange(LayoutWish(num_ranks=2, placement=path), SPEC)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid JSON"):
        arrange(LayoutWish(deployment=written(tmp_path / "bad.json", "{")), SPEC)
    plan = to_plain(contiguous_plan(COUNTS, 2))
    with pytest.raises(ConfigError, match=r"plan\.json: this is a placement; give it with --placement"):
        arrange(LayoutWish(deployment=written(tmp_path / "plan.json", json.dumps(plan))), SPEC)
    load = written(tmp_path / "load.json", json.dumps({"counts": [], "source": "engine"}))
    with pytest.raises(ConfigError, match=r"this is a load; moesaic balance .*load\.json -o plan\.json"):
        arrange(LayoutWish(num_ranks=2, placement=load), SPEC)
    with pytest.raises(ConfigError, match=r"^placement absent\.json: cannot be read .*moesaic balance -o$"):
        arrange(LayoutWish(num_ranks=2, placement="absent.json"), SPEC)


def test_options_beside_the_numerics_of_a_deployment_must_say_the_same() -> None:
    config = EngineConfig.parse("m", {"deployment": "d.json", "format": "int8", "kv_format": "bfloat16"})
    with pytest.raises(
        ConfigError, match=r"format int8 is asked for, but the deployment d\.json has bfloat16"
    ):
        config.numerics_for(SPEC, backend="native/avx2", stated=NUMERICS)
    assert replace(config, format=None).numerics_for(SPEC, backend="x", stated=NUMERICS) == NUMERICS
    fast = replace(config, format=None, preset="fast")
    with pytest.raises(ConfigError, match="numerics fast is asked for"):
        fast.numerics_for(SPEC, backend="x", stated=NUMERICS)
    other = replace(config, format=None, backend="native/avx2")
    with pytest.raises(ConfigError, match="has reference: leave it out"):
        other.numerics_for(SPEC, backend="x", stated=NUMERICS)
    left = replace(NUMERICS, backend="auto")
    assert other.numerics_for(SPEC, backend="x", stated=left) == replace(NUMERICS, backend="native/avx2")
    found = replace(config, format=None).numerics_for(SPEC, backend="native/portable", stated=left)
    assert found == replace(NUMERICS, backend="native/portable")


def test_a_planned_deployment_leaves_the_backend_to_the_machine_that_runs_it(tmp_path: Path) -> None:
    """What moesaic plan -o writes, and a fused layout of a file, which needs native kernels."""
    path = tmp_path / "d.json"
    asked = ["plan", "demo", "--machine", "h100x1x2", "--layout", "dp=2", "-o", str(path)]
    assert CliRunner().invoke(build_app("plan"), asked).exit_code == 0
    wish = LayoutWish(deployment=str(path))
    found = arrange(wish, SPEC)
    assert found.numerics is not None
    assert found.numerics.backend == "auto"
    with pytest.raises(KernelUnavailable, match="backend 'auto' is not built"):
        choose(found.numerics, num_threads=1)
    made = deployment(2, dispatcher="shared_memory", is_native=True)
    path.write_text(replace(made, numerics=replace(NUMERICS, backend="auto")).to_json())
    assert arrange(wish, SPEC, is_native=True).layout.is_fused
    with pytest.raises(ConfigError, match="is_fused = True: a fused layer is one call of native kernels"):
        arrange(wish, SPEC, is_native=False)


def test_options_of_a_layout_are_options_of_the_engine() -> None:
    assert EngineConfig.parse("m", {"num_ranks": 3}).layout == LayoutWish(num_ranks=3)
    stated = LayoutWish(num_ranks=3)
    assert EngineConfig.parse("m", {"layout": stated, "returns": "subtrees"}).layout == replace(
        stated, returns="subtrees"
    )
    with pytest.raises(ConfigError, match="did you mean num_ranks"):
        EngineConfig.parse("m", {"num_rank": 3})


def test_replicas_share_memory_where_each_has_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    two, four = data_parallel(4, tp=2), data_parallel(4, tp=4)
    near, apart, mixed = ["a"] * 4, ["a", "a", "b", "b"], ["a", "a", "b", "a"]
    monkeypatch.setattr("moesaic.kernels.native.module", lambda: object())
    assert [tp_wires_of(two, None, hosts) for hosts in (near, apart, mixed)] == [
        "shared_memory",
        "shared_memory",
        "gloo",
    ]
    assert tp_wires_of(four, None, apart) == "gloo"
    assert tp_wires_of(two, "gloo", near) == "gloo"
    assert tp_wires_of(data_parallel(4), None, near) is None
    assert describe_layout(four, "gloo") == "attention tp 4, experts ep 4, gathered, tp over gloo"
    with pytest.raises(ConfigError, match="ranks 2 and 3 of one share none: use gloo"):
        tp_wires_of(two, "shared_memory", mixed)
    with pytest.raises(ConfigError, match="--tp-wires gloo is for ranks that share attention, and none do"):
        tp_wires_of(data_parallel(4), "gloo", near)
    monkeypatch.setattr("moesaic.kernels.native.module", lambda: None)
    assert tp_wires_of(two, None, near) == "gloo"


def test_shared_memory_is_for_one_host() -> None:
    asked, unasked = LayoutWish(num_ranks=3, dispatcher="shared_memory"), LayoutWish(num_ranks=3)
    for wish in (asked, unasked):
        arranged = arrange(wish, SPEC, is_native=True)
        assert settle(arranged, wish, ["a", "a", "a"]) is arranged
    found = settle(arrange(unasked, SPEC, is_native=True), unasked, ["a", "a", "b"])
    assert found.layout == data_parallel(3, dispatcher="exchange")
    with pytest.raises(ConfigError, match="ranks 0 and 2 share none: use exchange or two_level"):
        settle(arrange(asked, SPEC), asked, ["a", "a", "b"])
    far = LayoutWish(num_ranks=3, dispatcher="exchange")
    assert settle(arrange(far, SPEC), far, ["a", "b", "b"]).layout.dispatcher == "exchange"
