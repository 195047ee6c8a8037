"""The sparse half and the decoder around it, over fakes: order of events, sums, tags; and its size."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import torch
from checkpoints import llama_config, write_checkpoint
from paged import PagedModel
from torch import Tensor

import moesaic.models.moe_block as module
from moesaic.experts.contract import Routing, Tag
from moesaic.models.build import load
from moesaic.models.dense_block import DenseBlock
from moesaic.models.moe_block import BranchNorms, MoeBlock
from moesaic.spec.model import DenseSpec
from moesaic.steps import DONE, Steps, drive

TAG = Tag(epoch=1, plan_version=2, step_id=3, micro_batch=4, chunk=0, layer_idx=5)


class FakeRouted:
    """Twice the rows, after `num_waits` waits; writes down what happens."""

    def __init__(self, events: list[str], num_waits: int) -> None:
        self.events = events
        self.num_waits = num_waits
        self.tags: list[Tag] = []

    def forward(self, x_TD: Tensor, routing: Routing, tag: Tag, hint_E: Tensor | None) -> Steps[Tensor]:
        self.tags.append(tag)
        self.events.append("send")
        for _ in range(self.num_waits):
            yield DONE
            self.events.append("resumed")
        self.events.append("collect")
        return 2 * x_TD


class FakeShared:
    """Five times the rows; writes down that it ran."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def forward(self, x_TD: Tensor, micro_batch: int) -> Steps[Tensor]:
        assert micro_batch == TAG.micro_batch
        yield from ()
        self.events.append("shared")
        return 5 * x_TD


def route(x_TD: Tensor) -> Routing:
    return Routing(
        experts_TK=torch.zeros(len(x_TD), 1, dtype=torch.int64), weights_TK=torch.ones(len(x_TD), 1)
    )


def block_of(events: list[str], *, has_shared: bool, num_waits: int = 2) -> MoeBlock:
    routed = FakeRouted(events, num_waits)
    shared = FakeShared(events) if has_shared else None
    return MoeBlock(moe_idx=7, router=route, routed=routed, shared=shared)


def test_the_shared_expert_runs_while_the_rows_are_away() -> None:
    events: list[str] = []
    x_TD = torch.arange(6.0).view(2, 3)
    [y_TD] = drive([block_of(events, has_shared=True).forward(x_TD, TAG)], 1.0)
    assert events == ["send", "shared", "resumed", "resumed", "collect"]
    assert torch.equal(y_TD, 7 * x_TD)


def test_without_a_shared_expert_the_routed_sum_is_the_result() -> None:
    events: list[str] = []
    block = block_of(events, has_shared=False)
    x_TD = torch.arange(6.0).view(2, 3)
    [y_TD] = drive([block.forward(x_TD, TAG)], 1.0)
    assert events == ["send", "resumed", "resumed", "collect"]
    assert torch.equal(y_TD, 2 * x_TD)


def test_norms_stand_around_each_branch() -> None:
    block = block_of([], has_shared=True)
    block.norms = BranchNorms(
        routed_in=lambda x: x + 1,
        routed_out=lambda x: 10 * x,
        shared_in=lambda x: x + 2,
        shared_out=torch.neg,
    )
    x_TD = torch.arange(6.0).view(2, 3)
    [y_TD] = drive([block.forward(x_TD, TAG)], 1.0)
    assert torch.equal(y_TD, 20 * (x_TD + 1) - 5 * (x_TD + 2))


def test_the_choices_are_reported_once_under_the_layers_number() -> None:
    block = block_of([], has_shared=False)
    seen: list[tuple[int, Routing]] = []
    drive(
        [block.forward(torch.ones(4, 3), TAG, lambda moe_idx, routing: seen.append((moe_idx, routing)))], 1.0
    )
    assert [moe_idx for moe_idx, _ in seen] == [7]
    assert seen[0][1].experts_TK.shape == (4, 1)


def test_two_micro_batches_take_turns() -> None:
    events: list[str] = []
    block = block_of(events, has_shared=True, num_waits=1)
    drive([block.forward(torch.ones(1, 3), TAG), block.forward(torch.ones(2, 3), TAG)], 1.0)
    assert events == ["send", "shared", "send", "shared", "resumed", "collect", "resumed", "collect"]


def test_the_sum_is_rounded_once_to_the_seam_dtype() -> None:
    x_TD = torch.full((1, 3), 1.0 + 2**-7, dtype=torch.bfloat16)
    [y_TD] = drive([block_of([], has_shared=True).forward(x_TD, TAG)], 1.0)
    assert y_TD.dtype == torch.bfloat16
    assert torch.equal(y_TD, ((2 * x_TD).double() + (5 * x_TD).double()).bfloat16())


def test_it_stays_small_and_knows_neither_layout_nor_kernel() -> None:
    text = Path(str(module.__file__)).read_text()
    assert len(text.splitlines()) <= 80
    names = [
        node.module if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    assert not [name for name in names if name and name.startswith(("moesaic.parallel", "moesaic.kernels"))]


def test_the_decoder_tags_each_sparse_layer(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path, llama_config()), num_threads=1)
    routed = FakeRouted([], 1)
    sparse = MoeBlock(moe_idx=0, router=route, routed=routed, shared=None)
    layers = list(model.decoder.layers)
    for i in (0, 2):
        ffn = layers[i].ffn
        assert ffn is not None
        layers[i] = replace(layers[i], ffn=replace(ffn, ffn=sparse))
    model.decoder.layers = tuple(layers)
    PagedModel(model).run("r", [1, 2, 3])
    assert [tag.layer_idx for tag in routed.tags] == [0, 2]


def test_an_output_gate_scales_the_shared_expert(tmp_path: Path) -> None:
    ops = load(write_checkpoint(tmp_path, llama_config()), num_threads=1).ops
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (8, 4), "up": (8, 4), "down": (4, 8), "output_gate": (1, 4)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    x_TD = torch.randn(5, 4, generator=generator)
    block = DenseBlock(DenseSpec(width=8, has_output_gate=True), weights, ops)
    [y_TD] = drive([block.forward(x_TD, 0)], 1.0)
    inner = torch.nn.functional.silu(x_TD @ weights["gate"].T) * (x_TD @ weights["up"].T)
    expected = torch.sigmoid(x_TD @ weights["output_gate"].T) * (inner @ weights["down"].T)
    torch.testing.assert_close(y_TD, expected)


def test_a_network_without_a_gate_is_activation_between_two_maps(tmp_path: Path) -> None:
    ops = load(write_checkpoint(tmp_path, llama_config()), num_threads=1).ops
    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (8, 4), "down": (4, 8), "up_bias": (8,), "down_bias": (4,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    x_TD = torch.randn(5, 4, generator=generator)
    spec = DenseSpec(width=8, activation="relu2", is_gated=False, has_bias=True)
    inner = torch.relu(x_TD @ weights["up"].T + weights["up_bias"]) ** 2
    expected = inner @ weights["down"].T + weights["down_bias"]
    [y_TD] = drive([DenseBlock(spec, weights, ops).forward(x_TD, 0)], 1.0)
    torch.testing.assert_close(y_TD, expected)
