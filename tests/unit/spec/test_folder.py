"""Near misses of a model folder: each says what was found, the rule, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from config_cases import CONFIGS

from moesaic.errors import MoesaicError
from moesaic.spec.locate import locate, preset

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
OLMOE = CONFIGS["olmoe"]
FOUR_BITS = {"bits": 4, "group_size": 128}


def put(folder: Path, **files: object) -> None:
    """Files by name, `__` for a dot and `_in_` for a slash; objects as JSON."""
    for name, content in files.items():
        path = folder / name.replace("_in_", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def index(folder: Path) -> None:
    put(folder, config__json=OLMOE)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "m-1.safetensors"}}))


CASES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "adapter": (
        lambda f: put(f, adapter_config__json={"base_model_name_or_path": "allenai/OLMoE"}),
        ("holds an adapter of allenai/OLMoE (adapter_config.json), not a whole model", "merge_and_unload"),
    ),
    "adapter beside a config": (
        lambda f: put(f, adapter_config__json={}, config__json=OLMOE),
        ("holds an adapter (adapter_config.json), not a whole model", "remove the adapter's files"),
    ),
    "tokenizer only": (
        lambda f: put(f, tokenizer__json={}, tokenizer_config__json={}),
        ("has no config.json: it holds a tokenizer and no model", "a model folder holds config.json"),
    ),
    "pickle": (
        lambda f: put(f, config__json=OLMOE, pytorch_model__bin="x"),
        ("weights as pickle (pytorch_model.bin)", "never read", "save_pretrained(OUT)"),
    ),
    "remote code": (
        lambda f: put(f, config__json=OLMOE | {"model_type": "new_moe", "auto_map": {"AutoConfig": "c.C"}}),
        ("'new_moe' comes with code of its own (auto_map", "never run here", "docs/models.md"),
    ),
    "sentence transformers": (
        lambda f: put(f, config__json=OLMOE, modules__json=[]),
        ("holds a sentence-transformers model (modules.json)", "give a language model"),
    ),
    "diffusers": (
        lambda f: put(f, model_index__json={}, unet_in_config__json={}),
        ("a model_index.json: it is a diffusers pipeline", "give a language model"),
    ),
    "one level below": (
        lambda f: put(f, final_in_config__json=OLMOE),
        ("has no config.json, but final in it has one: give ", "/final"),
    ),
    "maker's format": (
        lambda f: put(f, params__json={}, tokenizer__model="x"),
        ("a params.json: it is in its maker's own format", "a model folder holds config.json"),
    ),
    "gguf folder": (
        lambda f: put(f, big__gguf="GGUF"),
        ("has no config.json but big.gguf", "moesaic inspect ", "folder of safetensors"),
    ),
    "absent shards": (index, ("lists 1 files that are not in the folder: m-1.safetensors", "download them")),
    "lfs weights": (
        lambda f: put(f, config__json=OLMOE, model__safetensors=LFS),
        ("model.safetensors is a Git LFS pointer", "git lfs pull"),
    ),
    "lfs tokenizer": (
        lambda f: put(f, config__json=OLMOE, tokenizer__json=LFS),
        ("tokenizer.json is a Git LFS pointer", "git lfs pull"),
    ),
    "lfs config": (
        lambda f: put(f, config__json=LFS),
        ("config.json is a Git LFS pointer", "git lfs pull"),
    ),
    "awq": (
        lambda f: put(f, config__json=OLMOE | {"quantization_config": FOUR_BITS | {"quant_method": "awq"}}),
        ("stored as awq, which is not run yet", "give the unquantised checkpoint", "moesaic inspect"),
    ),
    "gptq": (
        lambda f: put(f, config__json=OLMOE | {"quantization_config": FOUR_BITS | {"quant_method": "gptq"}}),
        ("stored as gptq, which is not run yet", "give the unquantised checkpoint"),
    ),
    "fp8": (
        lambda f: put(f, config__json=OLMOE | {"quantization_config": {"quant_method": "fp8"}}),
        ("stored as fp8, which is not run yet", "give the unquantised checkpoint"),
    ),
    "fp8 of a family that does not run": (
        lambda f: put(f, config__json=preset("deepseek-v3.2").config),
        ("stored as fp8, which is not run yet", "nor is an unquantised one run: a sparse-attention index"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_near_misses_are_told_apart(tmp_path: Path, case: str) -> None:
    write, words = CASES[case]
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder)
    with pytest.raises(MoesaicError) as caught:
        locate(str(folder)).weights_folder()
    for word in words:
        assert word in str(caught.value)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 500 + 3 * len(str(folder))


def test_a_cache_folder_given_as_a_path_is_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "models--a--b" / "snapshots").mkdir(parents=True)
    with pytest.raises(MoesaicError, match="a repository of the Hugging Face cache; give its name, a/b"):
        locate(str(tmp_path / "models--a--b"))


def test_a_sound_folder_passes(tmp_path: Path) -> None:
    put(tmp_path, config__json=OLMOE | {"auto_map": {"AutoConfig": "c.C"}}, tokenizer__json={})
    assert locate(str(tmp_path)).weights_folder() == tmp_path, "known types need none of the code they bring"


def test_a_gguf_file_is_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(
        MoesaicError, match="is a GGUF file, whose weights are not run yet: `moesaic inspect`"
    ):
        locate(str(path))
