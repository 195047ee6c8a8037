"""Checkpoints whose experts are cut over ranks: what is kept, how many bytes it takes, the bits of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, Layout, write_checkpoint
from test_family_gpt_oss import MXFP4

from moesaic.audit.layout_cells import Cell, Placement, Shape
from moesaic.audit.layout_cells import make_plan as plan_of
from moesaic.audit.layout_trace import compare, make_work
from moesaic.audit.layouts import _Stage
from moesaic.engine.config import EngineConfig
from moesaic.kernels.ops import backends
from moesaic.kernels.panel import PanelWeight
from moesaic.models.build import LoadedModel, Share, build, read_spec
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.home import Home
from moesaic.parallel.dispatch.exchange import Exchange
from moesaic.parallel.transport import MemoryWires
from moesaic.spec.experts import contiguous_plan
from moesaic.spec.numerics import preset

WIDE: dict[str, Any] = {"moe_intermediate_size": 128, "intermediate_size": 128}


@pytest.mark.parametrize(
    ("family", "changes", "layout", "wishes", "shape", "placement"),
    [
        (
            "gpt_oss",
            {"quantization_config": MXFP4},
            "mxfp4",
            {"backend": backends()[-1]},
            {"num_ranks": 3, "dispatcher": "exchange", "num_slices": 4},
            "replicated",
        ),
        (
            "qwen3_moe",
            WIDE,
            "per_expert",
            {"backend": backends()[-1], "format": "int4-g32", "dtype": "bfloat16"},
            {"num_ranks": 2, "dispatcher": "gathered", "num_slices": 2, "tp": 2},
            "contiguous",
        ),
        (
            "qwen3_moe",
            {},
            "stacked",
            {"backend": "reference"},
            {"num_ranks": 2, "dispatcher": "two_level", "num_slices": 2},
            "random",
        ),
    ],
    ids=["mxfp4 with biases", "int4 beside tp", "reference"],
)
def test_a_model_in_slices_has_the_bits_of_one_rank(
    tmp_path: Path,
    family: str,
    changes: Any,
    layout: Layout,
    wishes: Any,
    shape: Any,
    placement: Placement,
) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[family](**changes), layout=layout)
    spec = read_spec(folder)
    config = EngineConfig.parse(str(folder), {"num_threads": 1, **wishes})
    stage = _Stage(config, spec, make_work(spec))
    found = Shape(returns="choices", is_fused=False, **shape)
    dtype = wishes.get("dtype", "float32")
    numerics = stage.numerics(dtype, wishes["backend"], found)
    assert numerics.matmul_shards == 4
    plan = plan_of(stage.num_experts, found.num_ranks, placement, found.num_slices)
    cell = Cell(dtype=dtype, backend=wishes["backend"], shape=found, num_micro_batches=2, placement=placement)
    alone = stage._build(numerics, None)
    with stage.ranks(numerics, plan, found) as ranks:
        assert compare(ranks.run(cell), stage.alone(numerics)).first is None
        stores = [model.store for model in ranks._models]
        weight_bytes = [model.weight_bytes for model in ranks._models]
    held = [sum(len(store.held(layer_idx)) for layer_idx, _ in spec.moe_layers) for store in stores]
    if placement == "contiguous":
        assert len(set(held)) == 1
        assert sum(store.weight_bytes for store in stores) == alone.store.weight_bytes
    assert max(weight_bytes) < alone.weight_bytes
    if (
        wishes["backend"] == "reference"
    ):  # no copies, no biases: each expert is there once, the rest on every rank
        moe = spec.moe_layers[0][1]
        experts = 4 * len(spec.moe_layers) * moe.num_experts * 3 * moe.expert_width * moe.row_width
        rest = alone.weight_bytes - experts
        assert sum(weight_bytes) == experts + found.num_ranks * rest
    down = stores[held.index(max(held))].table(spec.moe_layers[0][0]).weights[0].down_DF
    assert down.shape[1] == spec.moe_layers[0][1].expert_width // found.num_slices
    assert isinstance(down, PanelWeight) == ("format" in wishes)


def test_a_process_that_finds_the_slices_in_memory_reads_the_biases_beside_them(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", CONFIGS["gpt_oss"](), layout="stacked")
    spec = read_spec(folder)
    numerics = preset("portable", dtype="float32", backend=backends()[-1], matmul_shards=2)
    plan = contiguous_plan(tuple(moe.num_experts for _, moe in spec.moe_layers), 2, 2)

    def loaded() -> LoadedModel:
        return build(
            Checkpoint.open(folder),
            spec,
            numerics,
            num_threads=1,
            home=Home(shared_in=tmp_path),
            share=Share(
                rank=1,
                plan=plan,
                dispatcher=lambda spec, numerics, biases: Exchange(
                    spec.moe_layers, numerics, plan, MemoryWires(2).transport(1), down_biases=biases
                ),
            ),
        )

    first, second = loaded(), loaded()
    assert any("were found in" in note and "0 B were" not in note for note in second.notes)
    assert second.tensor_digests == first.tensor_digests
    for layer_idx, _ in spec.moe_layers:
        bias_ED = second.store.down_biases[layer_idx]
        assert bias_ED.abs().max() > 0
        assert torch.equal(bias_ED, first.store.down_biases[layer_idx])
