"""Placements as files: each target reads back, and what it cannot carry is refused."""

import json

import numpy as np
import pytest

from moesaic.errors import ConfigError
from moesaic.interop.placement_file import parse_target, placement_bytes, read_placement
from moesaic.interop.torch_file import read_torch
from moesaic.placement.grid import SlotGrid
from moesaic.placement.lpt import lpt
from moesaic.placement.plan import plan_of
from moesaic.placement.shares import even_shares, solve_shares
from moesaic.placement.slots import Placement

LOAD = np.random.default_rng(0).pareto(1.0, (2, 8)) * 100 + 1
PLACEMENT = lpt(LOAD, SlotGrid(num_experts=8, num_gpus=4, num_slots=12))
EVEN = plan_of(PLACEMENT, even_shares(PLACEMENT, 8))
LAYERS = (3, 5)  # of six


def written(target, plan=EVEN, suffix=".json"):
    return placement_bytes(target, plan, LOAD, LAYERS, 6, suffix)


@pytest.mark.parametrize(
    ("target", "suffix"), [("moesaic", ".json"), ("sglang", ".json"), ("trtllm", ".yaml")]
)
def test_what_is_written_reads_back(tmp_path, target, suffix):
    path = tmp_path / f"plan{suffix}"
    path.write_bytes(written(target))
    placement, shares = read_placement(path, 4, LAYERS)
    assert np.array_equal(placement.ids_LGC, PLACEMENT.ids_LGC)
    assert shares == pytest.approx(even_shares(PLACEMENT, 8))


def test_sglang_has_every_layer_and_dense_ones_too():
    data = json.loads(written("sglang"))
    assert list(data) == ["physical_to_logical_map"]
    rows = data["physical_to_logical_map"]
    assert [len(row) for row in rows] == [12] * 6
    assert rows[0] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert rows[3] == PLACEMENT.ids_LGC[0].ravel().tolist()


def test_trtllm_yaml_is_static_with_slots_in_rank_order(tmp_path):
    lines = written("trtllm").decode().splitlines()
    assert lines[:3] == ["num_slots: 12", "layer_updates_per_iter: 0", "initial_global_assignments:"]
    assert lines[3] == f"  3: {PLACEMENT.ids_LGC[0].ravel().tolist()}"
    block = lines[:3] + [
        line for layer, row in zip(LAYERS, PLACEMENT.ids_LGC.reshape(2, -1).tolist(), strict=True)
        for line in [f"  {layer}:", *(f"  - {expert}" for expert in row)]
    ]  # fmt: skip
    path = tmp_path / "block.yaml"
    path.write_text("\n".join(block) + "\n")
    assert np.array_equal(read_placement(path, 4, LAYERS)[0].ids_LGC, PLACEMENT.ids_LGC)


def test_kt_gets_hot_lists_or_the_counts_that_its_strategy_reads(tmp_path):
    hot = json.loads(written("kt"))["hottest_first"]
    assert hot["3"] == np.argsort(-LOAD[0], kind="stable").tolist()
    path = tmp_path / "stats.pt"
    path.write_bytes(written("kt", suffix=".pt"))
    counts = read_torch(path)["logical_count"]
    assert counts.shape == (1, 6, 8)
    assert counts[0, 3].tolist() == np.rint(LOAD[0]).tolist()


def test_what_a_target_cannot_carry_is_refused_by_name():
    shares = plan_of(PLACEMENT, solve_shares(PLACEMENT, LOAD))
    sliced = plan_of(Placement(ids_LGC=np.arange(16).reshape(1, 4, 4), num_slices=2), np.ones((1, 4, 4)))
    for target in ("sglang", "trtllm"):
        with pytest.raises(ConfigError, match=f"{target} splits .* cannot carry replica shares"):
            written(target, shares)
        with pytest.raises(ConfigError, match=f"{target} places whole experts"):
            placement_bytes(target, sliced, LOAD[:1], (3,), 6, ".json")
    assert (
        json.loads(written("moesaic", shares))["slot_share"][0]
        != json.loads(written("moesaic"))["slot_share"][0]
    )
    with pytest.raises(ConfigError, match="vLLM reads no placement file"):
        parse_target("vllm")
    with pytest.raises(ConfigError, match="did you mean sglang"):
        parse_target("sglan")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", '{"logical_count": [[1]]}', "no placement.*it is a load"),
        ("a.json", '{"physical_to_logical_map": [[0, 1], [0]]}', "all equally long"),
        ("a.json", '{"physical_to_logical_map": [[0, -1]]}', "lists of expert ids"),
        ("a.json", '{"physical_to_logical_map": [[0, 1, 2]]}', "3 mod 4 = 3"),
        ("a.json", '{"slot_expert": [[0]]}', "version is missing"),
        ("a.json", "[]", "got a list"),
        ("a.yaml", "num_slots: 3\n", "neither JSON nor a YAML with initial"),
        ("a.yaml", "initial_global_assignments:\n  3: [0, 1]\n", "no assignment for layer 5"),
    ],
)
def test_damaged_placements(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_placement(path, 4, LAYERS)


def test_a_map_without_gpus_says_what_to_give(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(written("sglang"))
    with pytest.raises(ConfigError, match="give --gpus"):
        read_placement(path, None, LAYERS)
