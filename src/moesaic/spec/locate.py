"""From a name or a path to a config: a model folder, a config file, or a preset of a well-known model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from moesaic.errors import ConfigError, nearest

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

    def weights_folder(self) -> Path:
        """The folder that holds the model's weights.

        Raises: ConfigError for a preset or a lone config file, which have none.
        """
        if self.kind != "folder" or self.path is None:
            raise ConfigError(
                f"{self.name} is a {self.kind.replace('_', ' ')}, which has no weights: give a model folder"
            )
        return self.path


def locate(name_or_path: str) -> Located:
    """The config behind a path that exists, else behind the name of a preset; `demo` is the packaged model.

    Preset names do not depend on case; the repository name of a model, with or without its owner, is one.

    Raises: ConfigError naming what is missing or damaged and the next step.
    """
    if name_or_path == "demo" and not _exists(Path("demo")):
        return locate_folder(DEMO_FOLDER, "demo")
    path = Path(name_or_path).expanduser() if name_or_path else Path()
    if name_or_path and _exists(path):
        if path.is_dir():
            return locate_folder(path)
        return Located(kind="config_file", name=str(path), path=path, config=read_json_object(path))
    if not name_or_path or name_or_path[0] in "./~" or path.suffix == ".json":
        raise ConfigError(
            f"no such file or folder: {name_or_path[:200]!r}; give a model folder, a config.json, or a "
            "preset such as "
            f"deepseek-v3"
        )
    return preset(name_or_path)


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
            "with "
            f"{CONFIG_FILE} in it"
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
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
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
        state = "has no" if _exists(path) else "does not exist, so neither does its"
        raise ConfigError(
            f"model folder {path} {state} {CONFIG_FILE}; a model folder holds {CONFIG_FILE}, "
            "tokenizer.json and "
            f"*.safetensors, as Hugging Face repositories do"
        )
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


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for a file, a folder that may not be searched
        return False
