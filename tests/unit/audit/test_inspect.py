from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from config_cases import CONFIGS

from moesaic.account.params import count_params
from moesaic.audit.inspect import Inspection, dump_json, inspect
from moesaic.cli.inspect import render
from moesaic.errors import CheckpointError, ConfigError
from moesaic.spec.families import read_config
from moesaic.units import format_count

REQUIRED = (
    "model_type", "reader", "runnable", "reasons", "total_params", "active_params", "num_layers",
    "num_moe_layers", "num_experts", "experts_per_token", "expert_bytes", "kv_bytes_per_token",
    "state_bytes_per_sequence",
)  # fmt: skip


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, list[int]]) -> Path:
    """A model folder with one file of zeros in bfloat16."""
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 2
        for dim in shape:
            size *= dim
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return folder


def test_a_preset_in_numbers() -> None:
    found = inspect("deepseek-v3", batch=64, machines=("h100", "a100"))
    data = json.loads(dump_json(found))
    assert set(REQUIRED) <= set(data)
    assert data["total_params"] == 671_026_419_200
    assert round(data["active_params"] / 1e9, 2) == 37.55
    assert (data["num_layers"], data["num_moe_layers"], data["moe_layers"][0]) == (61, 58, 3)
    assert (data["num_experts"], data["experts_per_token"], data["sparsity"]) == (256, 8, 32.0)
    assert data["num_experts_per_layer"] == [256] * 58
    assert data["expert_bytes"] == round(3 * 7168 * 2048 * (8 + 32 / 128**2) / 8)
    assert (data["kv_bytes_per_token"], data["state_bytes_per_sequence"]) == (70_272, 0)
    assert (data["reader"], data["runnable"]) == ("exact", False)
    assert "fp8" in data["reasons"][0]
    assert [view["devices_for_weights"] for view in data["machines"]] == [10, 10]
    assert data["step"]["batch"] == 64


def inspect_config(config: dict[str, Any], folder: Path) -> Inspection:
    path = folder / "some.json"
    path.write_text(json.dumps(config))
    return inspect(str(path))


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    data = inspect_config(CONFIGS["llama"], tmp_path).to_json()
    assert (data["num_moe_layers"], data["num_experts"], data["experts_per_token"], data["expert_bytes"]) == (
        0,
    ) * 4
    assert data["runnable"]
    assert data["machines"][0]["balance"] is None


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_is_shown(name: str, tmp_path: Path) -> None:
    found = inspect_config(CONFIGS[name], tmp_path)
    text = render(found)
    assert format_count(found.total_params) in text
    json.loads(dump_json(found))
    assert ("runs        yes" in text) == found.runnable
    for reason in found.reasons:
        assert reason in text


def test_text_says_what_the_numbers_say() -> None:
    text = render(inspect("deepseek-v3", batch=64, machines=("h100",)))
    for words in (
        "deepseek_v3, read exactly", "61, sparse: 3-60 (58)", "256 a layer, 8 chosen per token (E/k = "
        "32), 44.1 MB each",
        "671.03B, 37.55B per token", "70272 B per token", "10 x 80.0 GB for the weights alone", "222.4 "
        "distinct a layer",
        "multi-token prediction, 11.61B", "runs        no",
    ):  # fmt: skip
        assert words in text
    assert "1, 3, 5, 7, 9, 11, ... (24)" in render(inspect("llama-4-maverick"))


def test_a_model_with_states_says_that_it_reuses_no_prefix(tmp_path: Path) -> None:
    found = inspect_config(CONFIGS["qwen3_next"], tmp_path)
    assert found.state_bytes_per_sequence == 3 * (4 * 8 * 12 * 4 + (2 * 2 * 8 + 4 * 12) * 3 * 2)
    text = render(found)
    assert "of state per sequence" in text
    assert "no prefix is reused between requests: a running state cannot be cut at a block" in text
    assert "prefix" not in render(inspect_config(CONFIGS["qwen3_moe"], tmp_path))


def test_a_folder_with_its_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, CONFIGS["mixtral"], {"model.embed_tokens.weight": [100, 64]})
    found = inspect(str(folder))
    assert found.kind == "folder"
    assert found.checkpoint is not None
    assert (found.checkpoint.num_files, found.checkpoint.num_tensors, found.checkpoint.num_items) == (
        1,
        1,
        6400,
    )
    assert "files       1, " in render(found)


@pytest.mark.parametrize("rows", [99, 10**7])
def test_other_numbers_than_the_config_has_are_noted(tmp_path: Path, rows: int) -> None:
    config = CONFIGS["dbrx"]
    expected = count_params(read_config(config, name="m")).num_total
    found = inspect(str(write_folder(tmp_path, config, {"all": [rows]})))
    assert f"the weight files hold {rows} numbers, the config describes {expected}" in found.notes


def test_a_complete_folder_has_no_note(tmp_path: Path) -> None:
    config = CONFIGS["dbrx"] | {"torch_dtype": "bfloat16"}
    total = count_params(read_config(config, name="m")).num_total
    assert inspect(str(write_folder(tmp_path, config, {"all": [total]}))).notes == ()


def test_a_dtype_that_the_config_does_not_say_is_noted(tmp_path: Path) -> None:
    config = CONFIGS["mixtral"] | {"torch_dtype": "float32"}
    found = inspect(str(write_folder(tmp_path, config, {"all": [2]})))
    assert "stored as bfloat16; config.json implies float32" in found.notes[0]


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mixtral"]))
    found = inspect(str(tmp_path))
    assert found.notes == ("the folder holds no *.safetensors file",)
    assert "runs        the config yes; there are no weights here" in render(found)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    pickled = inspect(str(tmp_path))
    assert not pickled.runnable
    assert "as pickle (pytorch_model.bin)" in pickled.reasons[0]


def test_missing_shards_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path, CONFIGS["mixtral"], {"a": [1]})
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = inspect(str(tmp_path))
    assert found.checkpoint is not None
    assert found.checkpoint.missing_files == ("model-2.safetensors",)
    assert not found.runnable
    assert "model-2.safetensors" in found.reasons[0]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.block_sparse_moe.gate.weight",
        "model.language_model.layers.0.feed_forward.experts.down_proj",
    ],
)
def test_experts_under_a_dense_config_are_an_error(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path, CONFIGS["llama"], {name: [2, 2]})
    with pytest.raises(CheckpointError, match="describes a dense model"):
        inspect(str(folder))
    dense = write_folder(tmp_path, CONFIGS["llama"], {"model.layers.0.mlp.gate_proj.weight": [2, 2]})
    inspect(str(dense))


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown machine"):
        inspect("dbrx", machines=("h1000",))
    with pytest.raises(ConfigError, match="at least 1 token"):
        inspect("dbrx", batch=0)
    with pytest.raises(ConfigError, match=r"some.json: hidden_size is missing"):
        inspect_config({"model_type": "mixtral"}, tmp_path)


def test_the_command_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from moesaic.cli.main import main\n"
        "sys.argv = ['moesaic', 'inspect', 'deepseek-v3', '--batch', '8']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'scipy', 'pydantic', 'rich', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_prints_text_or_json_and_exits_2_on_an_error() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moesaic", "inspect", *arguments], capture_output=True, text=True
        )

    done = run("mixtral-8x7b", "--json", "--machine", "a100", "--machine", "h200", "--batch", "8")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [view["machine"] for view in data["machines"]] == ["a100", "h200"]
    assert data["runnable"]
    wrong = run("mixtral-8x8b")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: no folder, file or preset is called 'mixtral-8x8b' (did you mean")
