from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_cases import CONFIGS

from moesaic.errors import ConfigError
from moesaic.spec import locate as locating
from moesaic.spec.locate import locate, read_json_object


def write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


def test_folder_file_and_preset(tmp_path: Path) -> None:
    write(tmp_path / "config.json", CONFIGS["mixtral"])
    other = write(tmp_path / "mine.txt", CONFIGS["olmoe"])
    folder = locate(str(tmp_path))
    assert (folder.kind, folder.path, folder.config) == ("folder", tmp_path, CONFIGS["mixtral"])
    file = locate(str(other))
    assert (file.kind, file.path, file.config) == ("config_file", other, CONFIGS["olmoe"])
    known = locate("DeepSeek-V3")
    assert (known.kind, known.name, known.path) == ("preset", "deepseek-v3", None)


def test_a_path_that_exists_comes_before_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dbrx").mkdir()
    write(tmp_path / "dbrx" / "config.json", CONFIGS["mixtral"])
    monkeypatch.chdir(tmp_path)
    assert locate("dbrx").kind == "folder"


def test_demo_is_the_packaged_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "config.json", CONFIGS["olmoe"])
    monkeypatch.setattr(locating, "DEMO_FOLDER", tmp_path)
    assert locate("demo").path == tmp_path


def test_quantisation_in_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    write(tmp_path / "config.json", CONFIGS["mixtral"])
    write(
        tmp_path / "hf_quant_config.json",
        {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    )
    assert locate(str(tmp_path)).config["quantization_config"] == {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./absent", "no such file or folder: './absent'; give a model folder"),
        ("/absent/config.json", "no such file or folder"),
        ("absent.json", "no such file or folder"),
        ("", "no such file or folder: ''"),
        ("mixtral-8x8b", "did you mean mixtral-8x"),
        ("a" * 10_000, "no folder, file or preset is called 'aaa"),
        ("a\0b", "no folder, file or preset is called"),
    ],
)
def test_what_is_not_there_is_named_with_the_next_step(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        locate(name)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "./absent",
            "no such file or folder: './absent'; give a model folder, which holds config.json and safe",
        ),
        (
            "absent",
            "no folder here is called 'absent'; give a model folder, which holds config.json and safe",
        ),
    ],
)
def test_who_needs_weights_hears_of_no_preset(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        locate(name, needs_weights=True)
    assert "preset" not in str(caught.value)
    assert locate("mixtral-8x7b", needs_weights=True).kind == "preset", "which then says that it has none"


def test_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"has no config.json; a model folder holds config.json, tokenizer.json"
    ):
        locate(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe{}", "not UTF-8 text"),
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[1]", "must be a JSON object, got a list"),
        (b"3", "must be a JSON object, got a int"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 50_000, "nested too deep"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
    ids=["utf-16", "cut", "empty", "list", "number", "deep list", "deep object", "long integer"],
)
def test_damaged_json_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        read_json_object(path)
    assert str(caught.value).startswith(str(path))


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf{}")
    assert read_json_object(path) == {}


def test_a_file_too_large_for_a_config_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locating, "MAX_CONFIG_BYTES", 10)
    with pytest.raises(ConfigError, match="too many for a config"):
        read_json_object(write(tmp_path / "config.json", {"hidden_size": 64}))


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        locate(str(tmp_path))
