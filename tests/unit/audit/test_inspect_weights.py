"""A folder runs only where every weight has its name, shape and dtype: by the headers, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIGS, random_tensors, write_checkpoint, write_tensors
from torch import Tensor

from moesaic.audit.inspect import inspect
from moesaic.cli.inspect import render

Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3", "gpt_oss"])
def test_a_whole_folder_runs(tmp_path: Path, family: str) -> None:
    found = inspect(str(write_checkpoint(tmp_path, CONFIGS[family]())))
    assert found.runnable, found.reasons
    assert "runs        yes: every weight has its name, shape and dtype; only headers" in render(found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "filled by no tensor: model.norm.weight"),
        (lambda t: t.update({"model.mystery": torch.ones(2)}), "fill no parameter: model.mystery"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), "has shape [3], but config.json implies"),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)}),
            "model.norm.weight in FOLDER/model.safetensors has dtype I8 where a float weight is due",
        ),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
def test_what_does_not_fit_is_named_and_does_not_run(tmp_path: Path, change: Change, words: str) -> None:
    config = CONFIGS["mixtral"]()
    tensors = random_tensors(config)
    write_checkpoint(tmp_path, config, tensors=tensors)
    change(tensors)
    write_tensors(tmp_path, tensors)
    found = inspect(str(tmp_path))
    assert not found.runnable
    assert words.replace("FOLDER", str(tmp_path)) in found.reasons[0]
    assert "runs        no" in render(found)


def test_an_adapter_beside_the_weights_does_not_run(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["mixtral"]())
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    found = inspect(str(tmp_path))
    assert not found.runnable
    assert "holds an adapter of some/base" in found.reasons[0]


def test_looking_over_the_weights_needs_no_torch(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["gpt_oss"]())
    code = (
        "import sys\n"
        "from moesaic.audit.inspect import inspect\n"
        f"assert inspect({str(tmp_path)!r}).runnable\n"
        "heavy = {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
