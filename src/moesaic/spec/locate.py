"""From a name or a path to a config, in this order: a file or folder that exists, the packaged demo, a
repository in the local Hugging Face cache, a preset of a well-known model. Never the network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from moesaic.errors import CheckpointError, ConfigError, nearest
from moesaic.spec.families import read_config
from moesaic.spec.folder import (
    check_pointer,
    check_runnable,
    explain_no_config,
    missing_files,
    pickle_names,
    refuse_gguf,
)
from moesaic.spec.hub import RepoName, explain_absent, explain_incomplete, find_snapshot, parse_repo

PRESET_FOLDER = Path(__file__).parent / "presets"
DEMO_FOLDER = Path(__file__).parents[1] / "demo"
CONFIG_FILE = "config.json"
QUANT_FILE = "hf_quant_config.json"
MAX_CONFIG_BYTES = 64 * 2**20
"""The largest real configs list a few thousand module names: a tenth of a MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """A model's config and where it is from. `path` is the folder or the file; a preset has none."""

    kind: Literal["folder", "config_file", "preset"]
    name: str  # what messages call it
    path: Path | None
    config: Mapping[str, Any]
    repo: RepoName | None = None  # of a folder in the Hugging Face cache
    absent: str | None = None  # of a preset: where its weights were looked for

    @property
    def short_name(self) -> str:
        """What clients may call it: the repository, or the folder's own name."""
        if self.repo is not None:
            return self.repo.repo
        return self.name if self.path is None or self.name == "demo" else self.path.resolve().name

    def weights_folder(self) -> Path:
        """The folder that holds the model's weights, looked over for what can be seen without reading them.

        Raises: ConfigError for a preset or a lone config file, which have none; CheckpointError and
                UnsupportedModelError for a folder that the engine cannot run.
        """
        if self.kind != "folder" or self.path is None:
            raise ConfigError(
                f"{self.name} is a {self.kind.replace('_', ' ')}, which has no weights: give a model folder"
                + (f". {self.absent}" if self.absent else "")
            )
        if self.repo is not None:
            missing = missing_files(self.path)
            if not missing and not any(self.path.glob("*.safetensors")) and not pickle_names(self.path):
                missing = ("its weight files",)
            if missing:
                raise CheckpointError(explain_incomplete(self.path, missing, self.repo))
        check_runnable(self.path, self.config, read_config(self.config, name=str(self.path / CONFIG_FILE)))
        return self.path


WEIGHTS_HINT = "give a model folder, which holds config.json and safetensors files"


def locate(name_or_path: str, *, hub: Path | None = None, needs_weights: bool = False) -> Located:
    """The config of a path that exists, else of a cached repository, else of a preset; `demo` is packaged.

    `hub` is the Hugging Face cache, in which ORG/NAME and ORG/NAME@REVISION are looked up; None: nowhere.
    Preset names do not depend on case; the repository name of a model, with or without its owner, is one.
    `needs_weights` is for whoever runs the model: a name that is nowhere is then told what would be one.

    Raises: ConfigError naming what is missing or damaged and the next step.
    """
    if name_or_path == "demo" and not _exists(Path("demo")):
        return locate_folder(DEMO_FOLDER, "demo")
    path = Path(name_or_path).expanduser() if name_or_path else Path()
    if name_or_path and _exists(path):
        if path.is_dir():
            return locate_folder(path)
        if _is_gguf(path):
            raise refuse_gguf(path)
        return Located(kind="config_file", name=str(path), path=path, config=read_json_object(path))
    if not name_or_path or name_or_path[0] in "./~" or path.suffix == ".json":
        hint = "give a model folder, a config.json, or a preset such as deepseek-v3"
        raise ConfigError(
            f"no such file or folder: {name_or_path[:200]!r}; {WEIGHTS_HINT if needs_weights else hint}"
        )
    repo = parse_repo(name_or_path)
    if needs_weights and repo is None and name_or_path.lower() not in preset_names():
        raise ConfigError(
            f"no folder here is called {name_or_path[:80]!r}; {WEIGHTS_HINT}, demo, or ORG/NAME of the "
            "Hugging Face cache"
        )
    if repo is None or hub is None:
        return preset(name_or_path)
    snapshot = find_snapshot(repo, hub)
    if snapshot is not None:
        return replace(locate_folder(snapshot, name_or_path), repo=repo)
    absent = explain_absent(repo, hub)
    lower = name_or_path.lower()
    if not {lower, lower.rsplit("/", 1)[-1]} & set(preset_names()):
        raise ConfigError(absent)
    return replace(preset(name_or_path), absent=absent)


def preset(name: str) -> Located:
    """A well-known model's config by its name.

    Raises: ConfigError with the nearest names.
    """
    wanted = name.strip().lower()
    short = wanted.rsplit("/", 1)[-1]
    if "/" not in wanted and _exists(PRESET_FOLDER / f"{wanted}.json"):
        return Located(kind="preset", name=wanted, path=None, config=_read_preset(wanted)["config"])
    names = preset_names()
    stem = names.get(wanted) or names.get(short)
    if stem is None:
        hint = nearest(short[:80], (known for known in names if "/" not in known))
        raise ConfigError(
            f"no folder, file or preset is called {name[:80]!r} ({hint}); a model of your own is a folder "
            f"with {CONFIG_FILE} in it"
        )
    data = _read_preset(stem)
    return Located(kind="preset", name=stem, path=None, config=data["config"])


@cache
def preset_names() -> Mapping[str, str]:
    """Every name of a preset, in lower case, and the file it stands for."""
    names: dict[str, str] = {}
    for path in sorted(PRESET_FOLDER.glob("*.json")):
        data = _read_preset(path.stem)
        for name in (path.stem, *data["aliases"]):
            names[name.lower()] = path.stem
            names[name.lower().rsplit("/", 1)[-1]] = path.stem
    return names


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises: ConfigError when it cannot be read, is no UTF-8, no JSON, nested too deep, too large, or no
    object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"{path}: {size} bytes are too many for a config; at most {MAX_CONFIG_BYTES} are read"
            )
        check_pointer(path)
        text = path.read_bytes().decode("utf-8-sig")
        data = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text (byte {error.start}); a config is JSON in UTF-8"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deep to be a config") from error
    except ConfigError:
        raise
    except ValueError as error:  # JSONDecodeError, or an integer of thousands of digits
        raise ConfigError(
            f"{path}: not valid JSON: {error}; mend it there, or copy or download the file again"
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a config must be a JSON object, got a {type(data).__name__}")
    return data


def _read_preset(stem: str) -> dict[str, Any]:
    return read_json_object(PRESET_FOLDER / f"{stem}.json")


def locate_folder(path: Path, name: str | None = None) -> Located:
    """The config of a model folder; `name` is what messages call it, its path by default.

    Raises: ConfigError when the folder or its config is missing or damaged.
    """
    config_path = path / CONFIG_FILE
    if not _exists(config_path):
        if not _exists(path):
            raise ConfigError(f"model folder {path} does not exist: give a folder that holds {CONFIG_FILE}")
        raise ConfigError(explain_no_config(path))
    config = read_json_object(config_path)
    if config.get("quantization_config") is None and _exists(path / QUANT_FILE):
        config["quantization_config"] = _modelopt(path / QUANT_FILE)
    return Located(kind="folder", name=name or str(path), path=path, config=config)


def _modelopt(path: Path) -> dict[str, Any]:
    """ModelOpt's separate file in the form that newer exports put into config.json."""
    quantization = read_json_object(path).get("quantization")
    if not isinstance(quantization, dict):
        raise ConfigError(f"{path}: quantization must be a JSON object, got {type(quantization).__name__}")
    return {
        "quant_method": "modelopt",
        "quant_algo": quantization.get("quant_algo"),
        "ignore": quantization.get("exclude_modules"),
    }


def _is_gguf(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return path.suffix == ".gguf" or file.read(4) == b"GGUF"
    except OSError:
        return False  # the reader of the config says why


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for a file, a folder that may not be searched
        return False
