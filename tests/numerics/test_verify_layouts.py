"""`moesaic verify --layouts`: right layouts have the bits of one rank; of a wrong one the layer is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, write_checkpoint
from torch import Tensor
from typer.testing import CliRunner

from moesaic.audit import layout_cells, layouts
from moesaic.audit.layout_cells import Matrix, Refused
from moesaic.audit.layout_trace import MIN_ROWS, Trace, compare, make_work, run_ranks
from moesaic.audit.layouts import LayoutVerification, dump_json, need_bytes, verify_layouts
from moesaic.cli.main import build_app
from moesaic.cli.verify_layouts import render_layouts
from moesaic.engine.config import EngineConfig
from moesaic.engine.machine import Machine
from moesaic.errors import ConfigError, HostMemoryShort
from moesaic.experts.contract import Ticket
from moesaic.kernels import native
from moesaic.kernels.ops import backends
from moesaic.models.build import load, read_spec
from moesaic.parallel.dispatch.exchange import Exchange
from moesaic.parallel.dispatch.two_level import TwoLevel

EIGHT: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 8}  # layers 0 and 2 of 3 are sparse
SIX: dict[str, Any] = {"n_routed_experts": 16, "num_experts_per_tok": 6}  # layers 1 and 2 of 3
STABLE_KEYS = ("layouts", "expected", "run", "refused", "negative_control_caught", "ok")
LAYOUT_KEYS = (
    "name", "ranks", "dispatcher", "returns", "bit_identical", "max_abs_logit_diff", "first_differing_layer",
)  # fmt: skip


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eight")
    return write_checkpoint(folder, CONFIGS["qwen3_moe"](**EIGHT), dtype=torch.bfloat16)


def run(folder: Path, *, is_long: bool = False, **wishes: Any) -> LayoutVerification:
    return verify_layouts(EngineConfig(model=str(folder), num_threads=1, **wishes), is_long=is_long)


def assert_right(found: LayoutVerification) -> None:
    assert found.failures == ()
    assert found.negative_control_caught
    assert all(one.bit_identical and one.max_abs_logit_diff == 0.0 for one in found.layouts)
    assert len(found.layouts) + len(found.refused) == found.expected
    shared = set() if native.module() is None else {"shared_memory"}
    assert {one.dispatcher for one in found.layouts} - {"gathered"} == {
        "local",
        "exchange",
        "two_level",
    } | shared
    assert any(", tp 2, " in one.name for one in found.layouts)
    assert found.num_rows >= MIN_ROWS


def test_every_layout_of_six_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the reference and on one level of native kernels, where there is one."""
    monkeypatch.setattr(layouts, "backends", lambda: (backends()[0], *backends()[-1:])[: len(backends())])
    monkeypatch.setattr(layout_cells, "PLACEMENTS", ("random", "replicated"))
    config = CONFIGS["olmoe"](num_experts=16, num_experts_per_tok=6)
    found = run(write_checkpoint(tmp_path, config))
    assert {one.dtype for one in found.layouts} == {"float32"}
    assert_right(found)
    assert {one.ranks for one in found.layouts} == {1, 2, 3, 4}
    assert any(one.is_fused for one in found.layouts) == (len(backends()) > 1)
    text = render_layouts(found)
    assert f"{found.expected} layouts = {len(found.layouts)} run + {len(found.refused)} refused" in text
    assert "sums in other orders are caught" in text
    assert "the same bits in every layout that runs" in text


def test_eight_choices_in_the_dtype_of_the_checkpoint(eight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_cells, "NUM_RANKS", (1, 4))
    monkeypatch.setattr(layout_cells, "PLACEMENTS", ("replicated",))
    found = run(eight, backend=backends()[-1])
    assert {one.dtype for one in found.layouts} == {"float32", "bfloat16"}
    assert_right(found)


def test_rows_that_travel_in_fp8_are_named(eight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_cells, "NUM_RANKS", (1, 3))
    monkeypatch.setattr(layout_cells, "PLACEMENTS", ("random",))
    found = run(eight, backend=backends()[-1], dtype="float32", dispatch_format="fp8")
    assert found.failures == ()
    assert all(one.name.endswith(", rows in fp8") for one in found.layouts)


@pytest.mark.parametrize("kind", [Exchange, pytest.param(TwoLevel, marks=pytest.mark.matrix)])
def test_two_swapped_choices_are_caught_and_their_layer_named(
    eight: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exchange]
) -> None:
    right = Exchange.collect

    def swapped(self: Exchange, ticket: Any) -> Tensor:
        if type(self) is kind and ticket.tag.layer_idx == 2 and self.transport.num_ranks == 3:
            weights_TK = ticket.routing.weights_TK
            order = torch.tensor([1, 0, *range(2, weights_TK.shape[1])])
            ticket = replace_routing(ticket, weights_TK[:, order])
        return right(self, ticket)

    monkeypatch.setattr(Exchange, "collect", swapped)
    monkeypatch.setattr(layout_cells, "NUM_RANKS", (2, 3))
    monkeypatch.setattr(layout_cells, "PLACEMENTS", ("random",))
    found = run(eight, backend=backends()[-1], dtype="float32")
    wrong = [one for one in found.layouts if not one.bit_identical]
    names = ("exchange", "shared_memory") if kind is Exchange else ("two_level",)
    # Subtrees are weighted where the experts are, so the swap is in what comes back as choices.
    assert wrong == [
        one
        for one in found.layouts
        if one.dispatcher in names and not one.is_fused and (one.ranks, one.returns) == (3, "choices")
    ]
    assert wrong
    assert {one.first_differing_layer for one in wrong} == {2}
    assert all(one.max_abs_logit_diff > 0 for one in wrong)
    assert f"{wrong[0].name}: other bits from layer 2 on" in found.failures[0]
    assert json.loads(dump_json(found))["ok"] is False


def replace_routing(ticket: Any, weights_TK: Tensor) -> Ticket:
    ticket.routing = replace(ticket.routing, weights_TK=weights_TK)
    return ticket  # type: ignore[no-any-return]


def test_a_comparison_that_notices_nothing_proves_nothing(
    eight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "make_matrix", lambda *_, **__: Matrix(cells=(), refused=()))
    monkeypatch.setattr(layouts, "replace", lambda numerics, **_: numerics)  # the control is as right as all
    found = run(eight, backend="reference")
    assert found.negative_control_caught is False
    assert found.failures == ("one partial sum per rank was not noticed: the comparison proves nothing",)
    assert "one partial sum per rank NOT caught" in render_layouts(found)


def test_two_choices_have_one_order_so_nothing_is_to_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "make_matrix", lambda *_, **__: Matrix(cells=(), refused=()))
    found = run(write_checkpoint(tmp_path, CONFIGS["mixtral"]()), backend="reference")
    assert found.negative_control_caught is True, "that of leaves in another order"
    assert found.failures == ()
    assert "no negative control of experts: a sum of at most two products has one order" in found.notes


def test_a_layout_that_was_not_run_is_missed(eight: Path) -> None:
    empty = LayoutVerification(
        model="m",
        scope="all",
        layouts=(),
        expected=3,
        refused=(),
        negative_control_caught=True,
        num_rows=256,
        notes=(),
        seconds=0.0,
    )
    assert empty.failures == ("3 layouts were expected, 0 run and 0 refused",)
    none = replace(empty, expected=1, refused=(Refused(name="leaves", reason="so it is"),))
    assert none.failures == ("all 1 layouts were refused, so none was compared; leaves: so it is",)


def test_the_first_bit_that_differs_is_found() -> None:
    trace = Trace(hidden_ATD=torch.zeros(4, 5, 8), logits_TV=torch.ones(5, 9))
    other = Trace(hidden_ATD=trace.hidden_ATD.clone(), logits_TV=trace.logits_TV.clone())
    assert compare(other, trace).first is None
    other.logits_TV[4, 2] += 0.5
    assert compare(other, trace).first == "head"
    assert compare(other, trace).max_abs_logit_diff == 0.5
    other.hidden_ATD[3, 1, 1] = -0.0
    assert compare(other, trace).first == "layer 2"
    other.hidden_ATD[0, 1, 1] = float("nan")
    assert compare(other, trace).first == "embedding"
    assert compare(other, other).first is None


def test_requests_of_one_rank_do_not_depend_on_how_they_are_split(eight: Path) -> None:
    model = load(eight, num_threads=1, backend="reference")
    work = make_work(model.spec)
    assert {len(ids) for ids in work.token_ids} >= {2, 6}
    assert len(work.steps[-1]) == 1, "at last one token, and every other rank idle"
    whole, split = (run_ranks([model], work, num_micro_batches=parts) for parts in (1, 3))
    assert compare(split, whole).first is None
    assert whole.logits_TV.shape == (work.num_rows, model.spec.vocab)


def test_memory_is_stated_before_it_is_taken(eight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = need_bytes(read_spec(eight), "float32")

    def machine(available: int) -> Machine:
        return Machine(
            num_cpus=1, cpu_source="", total_bytes=need, available_bytes=available, memory_source=""
        )

    monkeypatch.setattr(layouts, "make_matrix", lambda *_, **__: Matrix(cells=(), refused=()))
    monkeypatch.setattr(layouts, "read_machine", lambda: machine(need - 1))
    found = run(eight, backend="reference")
    assert found.notes[0].startswith("not compared in float32: 4 ranks in one process take about 0.0 GB")
    monkeypatch.setattr(layouts, "read_machine", lambda: machine(100))
    with pytest.raises(HostMemoryShort, match="not compared in bfloat16: 4 ranks in one process"):
        run(eight, backend="reference")


def test_a_dense_model_has_one_layout(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no routed experts, so there is one layout"):
        run(write_checkpoint(tmp_path, CONFIGS["llama"]()))


def test_the_command_fails_with_3_and_prints_its_stable_keys(
    eight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_cells, "NUM_RANKS", (2,))
    monkeypatch.setattr(layout_cells, "PLACEMENTS", ("random",))
    monkeypatch.setattr(layouts, "backends", lambda: ("reference",))
    arguments = ["verify", str(eight), "--layouts", "all", "--dtype", "float32", "--threads", "1", "--json"]
    right = CliRunner().invoke(build_app("verify"), arguments)
    assert right.exit_code == 0
    assert "] float32 reference, 2 ranks, random: " in right.stderr
    data = json.loads(right.stdout)
    assert tuple(data)[:6] == STABLE_KEYS
    assert tuple(data["layouts"][0])[:7] == LAYOUT_KEYS
    assert data["run"] + len(data["refused"]) == data["expected"]
    collect = Exchange.collect
    monkeypatch.setattr(Exchange, "collect", lambda self, ticket: 2 * collect(self, ticket))
    wrong = CliRunner().invoke(build_app("verify"), arguments)
    assert wrong.exit_code == 3
    assert json.loads(wrong.stdout)["layouts"][-1]["first_differing_layer"] == 0
    refused = CliRunner().invoke(build_app("verify"), [*arguments, "--tokens", "2"])
    assert isinstance(refused.exception, ConfigError)
    assert "leave out --tokens" in str(refused.exception)


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "changes"), [("qwen3_moe", EIGHT), ("deepseek_v3", SIX)])
def test_the_long_matrix(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    assert_right(
        run(write_checkpoint(tmp_path, CONFIGS[family](**changes), dtype=torch.bfloat16), is_long=True)
    )


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["qwen3_next", "gpt_oss", "llama4", "gemma4", "mixtral"])
def test_states_windows_sinks_weighted_inputs_and_branches(tmp_path: Path, family: str) -> None:
    found = run(write_checkpoint(tmp_path, CONFIGS[family](), dtype=torch.bfloat16))
    assert found.failures == ()
    assert found.negative_control_caught is not False
    assert {one.ranks for one in found.layouts} == {1, 2, 3, 4}


@pytest.mark.long
def test_the_demo_in_every_layout() -> None:
    from moesaic.spec.locate import locate

    assert_right(run(locate("demo", hub=None, needs_weights=True).weights_folder()))
