"""Consecutive layers in one native call have the bits of their halves; controls show it can fail."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, qwen3_moe_config, write_checkpoint
from marks import needs_native
from paged import PagedModel
from stacks import VOCAB, Told, check_same, in_halves, load_stack, results, stacks
from torch import Tensor

from moesaic.errors import KernelTimeout
from moesaic.experts.contract import Tag
from moesaic.kernels import native
from moesaic.kernels.native.ops import NativeOps
from moesaic.kv.pool import BatchLayout
from moesaic.models import stack as module
from moesaic.models.build import LoadedModel, load
from moesaic.models.decoder import _OneLayer
from moesaic.models.stack import LayerStack
from moesaic.spec.experts import contiguous_plan
from moesaic.spec.numerics import DType, Format
from moesaic.steps import drive

pytestmark = needs_native
Steps = list[list[tuple[str, list[int]]]]


def make_steps() -> Steps:
    """Prompts of several sequences, past the window and past a block; then one row, three and sixteen."""
    rng = random.Random(3)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(VOCAB), k=count)

    names = [f"s{i}" for i in range(16)]
    return [
        [("s0", tokens(70)), ("s1", tokens(17)), ("s2", tokens(1))],
        [("s1", tokens(1))],
        [(name, tokens(2)) for name in names[3:]],
        [(name, tokens(1)) for name in names[:3]],
        [(name, tokens(1)) for name in names],
        [(name, tokens(1)) for name in names],
        [("s0", tokens(5)), ("s9", tokens(1))],
    ]


def both(model: LoadedModel, steps: Steps) -> tuple[list[Tensor], list[Tensor]]:
    return results(PagedModel(model), steps), results(PagedModel(in_halves(model)), steps)


@pytest.mark.parametrize(
    ("num_layers", "dtype", "format", "num_threads"),
    [
        (1, "float32", None, 1),
        (2, "bfloat16", None, 2),
        (3, "float32", "int4-g32", 1),
        (3, "bfloat16", "int8-g32", 2),
        (2, "bfloat16", "int4-g32", 2),
    ],
)
def test_bits_are_those_of_the_halves(
    num_layers: int, dtype: DType, format: Format | None, num_threads: int, tmp_path: Path
) -> None:
    model = load_stack(tmp_path, num_layers, dtype, format, num_threads=num_threads)
    assert [len(stack._layers) for stack in stacks(model.decoder)] == [num_layers]
    assert len(PagedModel(model).pool.groups) == min(num_layers, 2), "layers with windows have other places"
    check_same(*both(model, make_steps()))


def test_layers_between_others_are_stacks_of_their_own(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, qwen3_moe_config(num_hidden_layers=4))
    model = load(folder, num_threads=1, backend=f"native/{native.levels()[-1]}")
    assert [type(part) for part in model.decoder._parts] == [LayerStack, _OneLayer, LayerStack]
    assert [len(stack._layers) for stack in stacks(model.decoder)] == [1, 2]
    check_same(*both(model, make_steps()[:4]))


def test_which_families_go_as_stacks(tmp_path: Path) -> None:
    found = {}
    for family in ("qwen3_moe", "mixtral", "llama", "gpt_oss", "deepseek_v3", "gemma4", "dots1"):
        folder = write_checkpoint(tmp_path / family, CONFIGS[family]())
        model = load(folder, num_threads=1, backend=f"native/{native.levels()[0]}")
        found[family] = [len(stack._layers) for stack in stacks(model.decoder)]
    # The others: no experts, biases, latent attention, norms around branches.
    assert found == {
        "qwen3_moe": [1, 1], "mixtral": [2], "llama": [], "gpt_oss": [], "deepseek_v3": [], "gemma4": [],
        "dots1": [2],
    }  # fmt: skip


def test_a_step_is_one_call_and_counts_a_launch_a_layer(tmp_path: Path) -> None:
    model = load_stack(tmp_path, 3)
    assert isinstance(model.ops, NativeOps)
    paged = PagedModel(model)
    paged.step(("a", [1, 2, 3]))
    [stack], told = stacks(model.decoder), []
    native_stack = stack._calls[0]._native
    begin = native_stack.begin

    def spy(*arguments: Any) -> int:
        told.append(arguments)
        return begin(*arguments)

    native_stack.begin = spy
    before, jobs = model.ops.moe_counts, model.meter.read().num_jobs
    paged.step(("a", [4]), ("b", [5, 6]))
    after = model.ops.moe_counts
    assert len(told) == 1
    assert after.launches - before.launches == 3
    assert after.jobs - before.jobs == model.meter.read().num_jobs - jobs == 3 * 3 * 3


def test_another_plan_of_the_store_moves_no_bit_and_takes_effect(tmp_path: Path) -> None:
    model, steps = load_stack(tmp_path, 2), make_steps()
    assert model.store is not None
    assert model.placed is not None
    expected = results(PagedModel(in_halves(model)), steps)
    paged, found = PagedModel(model), []
    plan = contiguous_plan((16, 16), 1)
    for number, rows in enumerate(steps):
        found += results(paged, [rows])[: -len(expected[-4:])]
        slots = tuple(slots if number % 2 else slots[::-1].copy() for slots in plan.slot_expert)
        drive([model.placed.adopt(replace(plan, version=number + 1, slot_expert=slots))], 1.0)
        [stack] = stacks(model.decoder)
        assert stack._held != model.store.num_replaced, "noticed by the next step"
    check_same(found, expected[:-4])
    before = model.store.num_replaced
    drive([model.placed.adopt(replace(plan, version=99, slot_expert=slots))], 1.0)
    assert model.store.num_replaced == before, "a plan that moves nothing has nothing bound again"
    # The control: the same weights under exchanged names.
    for layer_idx in range(2):
        table = model.store.table(layer_idx)
        model.store._tables[layer_idx] = replace(table, part_ids=table.part_ids[::-1])
    other = results(PagedModel(model), steps)
    assert not torch.equal(other[0], expected[0])


def test_each_pool_is_bound_when_it_comes(tmp_path: Path) -> None:
    model, steps = load_stack(tmp_path, 2), make_steps()
    expected = results(PagedModel(in_halves(model)), steps)
    paged = [PagedModel(model), PagedModel(model)]
    found: list[list[Tensor]] = [[], []]
    for rows in steps:
        for one, tensors in zip(paged, found, strict=True):
            tensors += results(one, [rows])[:-4]
    for tensors in found:
        check_same(tensors, expected[:-4])


def test_micro_batches_have_calls_of_their_own(tmp_path: Path) -> None:
    """Both are begun before either is over."""
    model, steps = load_stack(tmp_path, 2, "bfloat16"), make_steps()
    expected = [results(PagedModel(in_halves(model)), [rows])[:-4] for rows in steps[:2]]
    pools = [PagedModel(model), PagedModel(model)]
    told, forwards = [Told(), Told()], []
    for micro_batch, (paged, rows) in enumerate(zip(pools, steps[:2], strict=True)):
        plans = [paged._plan(name, tokens) for name, tokens in rows]
        tokens_T = torch.tensor([token for _, tokens in rows for token in tokens])
        tag = Tag(epoch=0, plan_version=0, step_id=0, micro_batch=micro_batch, chunk=0, layer_idx=0)
        layout = BatchLayout.of(plans, paged.pool)
        forwards.append(model.decoder.forward(tokens_T, layout, paged.pool, tag, told[micro_batch]))
    hidden = drive(forwards, 1.0)
    for i in range(2):
        logits = model.decoder.logits(hidden[i]).split([len(tokens) for _, tokens in steps[i]])
        choices = [one for _, experts_TK, weights_TK in told[i].routings for one in (experts_TK, weights_TK)]
        check_same([*logits, *choices], expected[i])
    assert len(stacks(model.decoder)[0]._calls) == 2


@pytest.mark.parametrize("mutation", ["order", "pools", "places", "rotation"])
def test_what_is_bound_wrongly_shows(mutation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls."""
    model, steps = load_stack(tmp_path, 3), make_steps()[:5]
    [stack] = stacks(model.decoder)

    def change(layers: list[module.StackLayer]) -> list[module.StackLayer]:
        if mutation == "order":
            return [layers[0], layers[2], layers[1]]
        if mutation == "pools":
            return [
                layers[0],
                replace(layers[1], keys=layers[2].keys),
                replace(layers[2], keys=layers[1].keys),
            ]
        if mutation == "places":
            return [replace(layer, places=1 - layer.places) for layer in layers]
        return layers

    ops = stack._layers[0].mixer.ops
    make = ops.layer_stack
    monkeypatch.setattr(ops, "layer_stack", lambda layers, *counts: make(change(layers), *counts))
    if mutation == "rotation":
        rows = stack._ropes[0].rows
        monkeypatch.setattr(stack._ropes[0], "rows", lambda count: tuple(x.roll(1, 0) for x in rows(count)))
    with pytest.raises((AssertionError, ValueError)):  # a window's places have no old blocks
        check_same(*both(model, steps))


def test_numbers_that_are_none_stay_in_their_sequence(tmp_path: Path) -> None:
    model = load_stack(tmp_path, 2)
    rows = [("a", [1, 2, 3]), ("b", [7, 9]), ("c", [4])]
    expected = PagedModel(model).step(*rows)
    model.decoder.embedding_VD[9] = torch.nan
    found = PagedModel(model).step(*rows)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])
    assert found[1][1].isnan().all()


def test_what_was_told_is_written_again_only_by_a_step_of_equal_size(tmp_path: Path) -> None:
    model = load_stack(tmp_path, 2)
    paged, told = PagedModel(model), []

    def step(*rows: tuple[str, list[int]]) -> Tensor:
        paged.step(*rows, observe=lambda _, routing: told.append(routing))
        return told[-1].experts_TK

    first = step(("a", [1, 2]))
    assert step(("a", [3]), ("b", [4])) is first
    assert step(("a", [1])) is not first
    assert told[0].experts_TK.data_ptr() != told[1].experts_TK.data_ptr(), "a part for each layer"


def test_a_call_that_does_not_end_stops_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tasks that take much longer than threads are waited for at all.
    model = load_stack(tmp_path, 2, num_threads=4, level="portable", moe_intermediate_size=1024)
    paged = PagedModel(model, num_blocks=512)
    monkeypatch.setattr(module, "TIMEOUT_S", 0.0)

    def tries() -> None:
        for _ in range(300):  # by luck the others are done when the caller is
            paged.step(*((f"s{i}", [i]) for i in range(16)))

    with pytest.raises(
        KernelTimeout, match=r"layer \d: stage (rows|inner|down|combine) did not end within 0"
    ):
        tries()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="did not end in time"):
        paged.step(("s", [1]))
