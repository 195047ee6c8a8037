from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesaic.account.params import count_params
from moesaic.errors import ConfigError
from moesaic.spec.families import read_config
from moesaic.spec.locate import PRESET_FOLDER, preset, preset_names

WRITTEN_OUT = {
    "deepseek-v3": ("deepseek-ai--DeepSeek-V3", "deepseek-ai--DeepSeek-R1"),
    "deepseek-v3.2": ("deepseek-ai--DeepSeek-V3.2",),
    "deepseek-v2": ("deepseek-ai--DeepSeek-V2",),
    "mixtral-8x7b": ("mistralai--Mixtral-8x7B-v0.1",),
    "mixtral-8x22b-v0.1": ("mistralai--Mixtral-8x22B-v0.1",),
    "qwen3-30b-a3b": ("Qwen--Qwen3-30B-A3B",),
    "qwen3-235b-a22b": ("Qwen--Qwen3-235B-A22B",),
    "qwen3-coder-480b": ("Qwen--Qwen3-Coder-480B-A35B-Instruct",),
    "qwen3-vl-30b-a3b": ("Qwen--Qwen3-VL-30B-A3B-Instruct",),
    "qwen1.5-moe-a2.7b": ("Qwen--Qwen1.5-MoE-A2.7B-Chat",),
    "qwen2-57b-a14b": ("Qwen--Qwen2-57B-A14B",),
    "qwen3.5-35b-a3b": ("Qwen--Qwen3.5-35B-A3B",),
    "qwen3.5-122b-a10b": ("Qwen--Qwen3.5-122B-A10B",),
    "qwen3.5-397b-a17b": ("Qwen--Qwen3.5-397B-A17B",),
    "dbrx": ("databricks--dbrx-instruct",),
    "kimi-k2": ("moonshotai--Kimi-K2-Instruct",),
    "kimi-k2.5": ("moonshotai--Kimi-K2.5",),
    "gpt-oss-20b": ("openai--gpt-oss-20b",),
    "gpt-oss-120b": ("openai--gpt-oss-120b",),
    "glm-4.5-air": ("zai-org--GLM-4.5-Air",),
    "glm-5": ("zai-org--GLM-5",),
    "glm-5.2": ("zai-org--GLM-5.2",),
    "minimax-m2": ("MiniMaxAI--MiniMax-M2.5",),
    "llama-4-maverick": ("meta-llama--Llama-4-Maverick-17B-128E-Instruct",),
    "nemotron-3-nano": ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",),
    "nemotron-3-super": ("nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8",),
}
CUT_SHORT = {
    "deepseek-v2-lite": "deepseek-ai--DeepSeek-V2-Lite-Chat",
    "olmoe-1b-7b": "allenai--OLMoE-1B-7B-0125-Instruct",
    "granite-3.1-3b-a800m": "ibm-granite--granite-3.1-3b-a800m-instruct",
    "dots.llm1": "rednote-hilab--dots.llm1.inst",
    "glm-4.5": "zai-org--GLM-4.5_4.6_4.7-355B",
}
"""The file at hand has only some keys of the released config; the preset has them all."""

WITHOUT_A_FILE = {"mixtral-8x22b", "qwen3-next-80b-a3b"}
DENSE = {
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-32b": 32_762_123_264,
}
"""Dense models that sparse ones are compared with, and their parameters as published."""


def test_every_preset_is_read_and_has_a_source() -> None:
    for path in PRESET_FOLDER.glob("*.json"):
        data = json.loads(path.read_text())
        assert set(data) == {"source", "aliases", "config"}
        assert "huggingface.co" in data["source"]
        assert any("/" in alias for alias in data["aliases"])
        spec = read_config(data["config"], name=path.name)
        assert (spec.reader == "exact") == (path.stem != "qwen3-32b")
        assert bool(spec.moe_layers) == (path.stem not in DENSE)


def test_every_preset_is_compared() -> None:
    stems = {path.stem for path in PRESET_FOLDER.glob("*.json")}
    assert stems == set(WRITTEN_OUT) | set(CUT_SHORT) | WITHOUT_A_FILE | set(DENSE)


@pytest.mark.parametrize("name", DENSE)
def test_dense_presets_have_their_published_size(name: str) -> None:
    spec = read_config(preset(name).config, name=name)
    assert count_params(spec).num_total == pytest.approx(DENSE[name], rel=1e-6)


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_a_preset_is_the_released_config(name: str, shared_data: Path) -> None:
    mine = read_config(preset(name).config, name=name)
    for stem in WRITTEN_OUT[name]:
        theirs = json.loads((shared_data / "configs" / f"{stem}.json").read_text())
        assert mine == read_config(theirs, name=stem)


@pytest.mark.parametrize("name", CUT_SHORT)
def test_a_preset_agrees_with_every_key_of_a_shortened_config(name: str, shared_data: Path) -> None:
    mine = preset(name).config
    theirs = json.loads((shared_data / "configs" / f"{CUT_SHORT[name]}.json").read_text())
    assert read_config({**mine, **theirs}, name=name) == read_config(mine, name=name)


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("DeepSeek-V3", "deepseek-v3"),
        ("deepseek-r1", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("somebody/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        (" olmoe-1b-7b ", "olmoe-1b-7b"),
    ],
)
def test_lookup_takes_any_case_and_the_repository_name(name: str, stem: str) -> None:
    assert preset(name).name == stem


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean deepseek-v3"):
        preset("deepseek-v33")


def test_no_two_presets_share_a_name() -> None:
    for path in PRESET_FOLDER.glob("*.json"):
        for name in (path.stem, *json.loads(path.read_text())["aliases"]):
            assert preset_names()[name.lower()] == path.stem
