"""Models in the local Hugging Face cache: found offline, or refused with where was looked and what to run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_cases import CONFIGS

from moesaic.audit.inspect import inspect
from moesaic.engine.config import read_hub_cache
from moesaic.errors import CheckpointError, ConfigError
from moesaic.spec.hub import parse_repo
from moesaic.spec.locate import locate

COMMIT, OLDER = "0123456789abcdef" * 2 + "01234567", "f" * 40
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_repo(cache: Path, repo: str = "allenai/OLMoE-1B-7B") -> Path:
    """A cached repository as hf download leaves it: links into blobs."""
    folder = cache / ("models--" + repo.replace("/", "--"))
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    files = {
        "config.json": json.dumps(CONFIGS["olmoe"]),
        "model.safetensors.index.json": json.dumps(index),
        SHARDS[0]: "1",
        SHARDS[1]: "2",
    }
    for name in ("refs", "blobs", f"snapshots/{COMMIT}"):
        (folder / name).mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "refs" / "v1").write_text(OLDER)
    for i, (name, text) in enumerate(files.items()):
        (folder / "blobs" / f"blob{i}").write_text(text)
        (folder / "snapshots" / COMMIT / name).symlink_to(f"../../blobs/blob{i}")
    return folder


@pytest.mark.parametrize(
    "name", ["allenai/OLMoE-1B-7B", "allenai/OLMoE-1B-7B@main", f"allenai/OLMoE-1B-7B@{COMMIT[:9]}"]
)
def test_a_cached_repository_is_a_folder(tmp_path: Path, name: str) -> None:
    folder = write_repo(tmp_path)
    found = locate(name, hub=tmp_path)
    assert (found.kind, found.path) == ("folder", folder / "snapshots" / COMMIT)
    assert found.weights_folder() == found.path
    assert (found.name, found.short_name) == (name, "allenai/OLMoE-1B-7B")


def test_order_is_path_then_cache_then_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "hub"
    write_repo(hub, "deepseek-ai/DeepSeek-V3")
    found = locate("deepseek-ai/DeepSeek-V3", hub=hub)
    assert found.config["model_type"] == "olmoe"
    assert locate("deepseek-ai/DeepSeek-V3").kind == "preset"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deepseek-ai" / "DeepSeek-V3").mkdir(parents=True)
    (tmp_path / "deepseek-ai" / "DeepSeek-V3" / "config.json").write_text(json.dumps(CONFIGS["mixtral"]))
    assert locate("deepseek-ai/DeepSeek-V3", hub=hub).config["model_type"] == "mixtral"


def test_inspect_reads_a_repository_of_which_only_the_config_was_fetched(tmp_path: Path) -> None:
    folder = write_repo(tmp_path)
    for name in ("model.safetensors.index.json", *SHARDS):
        (folder / "snapshots" / COMMIT / name).unlink()
    assert inspect("allenai/OLMoE-1B-7B", hub=tmp_path).num_experts == CONFIGS["olmoe"]["num_experts"]
    with pytest.raises(
        CheckpointError, match=r"lacks its weight files .*run `hf download allenai/OLMoE-1B-7B`"
    ):
        locate("allenai/OLMoE-1B-7B", hub=tmp_path).weights_folder()


def test_what_is_not_cached_says_where_was_looked(tmp_path: Path) -> None:
    write_repo(tmp_path)
    with pytest.raises(ConfigError) as caught:
        locate("allenai/OLMoE-1B-7C@v2", hub=tmp_path)
    text = str(caught.value)
    assert str(tmp_path) in text
    assert "did you mean allenai/OLMoE-1B-7B?" in text
    assert "`hf download allenai/OLMoE-1B-7C --revision v2`" in text
    with pytest.raises(ConfigError, match="absent does not exist; fetch it with `hf download a/b`"):
        locate("a/b", hub=tmp_path / "absent")


def test_a_preset_without_weights_says_so_too(tmp_path: Path) -> None:
    found = locate("deepseek-ai/DeepSeek-V3", hub=tmp_path)
    assert found.kind == "preset"
    with pytest.raises(
        ConfigError, match=r"is a preset, which has no weights.*hf download deepseek-ai/DeepSeek-V3"
    ):
        found.weights_folder()


def test_an_unknown_revision_names_the_known_ones(tmp_path: Path) -> None:
    write_repo(tmp_path)
    with pytest.raises(ConfigError, match=r"no revision 'v2' of it \(.*v1"):
        locate("allenai/OLMoE-1B-7B@v2", hub=tmp_path)


def test_incomplete_downloads_name_the_missing_file(tmp_path: Path) -> None:
    folder = write_repo(tmp_path)
    (folder / "blobs" / "blob3").rename(folder / "blobs" / "blob3.incomplete")
    with pytest.raises(
        ConfigError,
        match=f"incomplete: {SHARDS[1]} of snapshot 0123456789ab is a link to blob3, which is not there "
        r"\(1 downloads in blobs/ were cut short or are under way\)",
    ):
        locate("allenai/OLMoE-1B-7B", hub=tmp_path)
    (folder / "snapshots" / COMMIT / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {SHARDS[1]}"):
        locate("allenai/OLMoE-1B-7B", hub=tmp_path).weights_folder()
    (folder / "snapshots" / COMMIT / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config.json"):
        locate("allenai/OLMoE-1B-7B", hub=tmp_path)


def test_a_repository_without_a_snapshot(tmp_path: Path) -> None:
    (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs" / "x.incomplete").touch()
    with pytest.raises(ConfigError, match=r"has no files \(1 downloads"):
        locate("a/b", hub=tmp_path)


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/b"),
        ({"HF_HOME": "/c", "XDG_CACHE_HOME": "/d"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({}, str(Path("~/.cache/huggingface/hub").expanduser())),
    ],
)
def test_the_cache_is_where_hugging_face_keeps_it(environ: dict[str, str], folder: str) -> None:
    assert read_hub_cache(environ) == Path(folder)


@pytest.mark.parametrize(
    "name", ["demo", "a/b/c", "../a/b", "a/../b", "/a/b", "a/b@", "~/a", "a/" + "b" * 200]
)
def test_what_is_no_repository_name(name: str) -> None:
    assert parse_repo(name) is None
