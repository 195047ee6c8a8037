"""What a folder that should hold a model holds instead: each near miss named, with the rule and the way out.

Looks at names and at the first bytes of files; weights are never read here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.errors import CheckpointError, ConfigError, UnsupportedModelError
from moesaic.spec.model import STORED_AS, ModelSpec

INDEX_FILE = "model.safetensors.index.json"
RULE = "a model folder holds config.json, tokenizer.json and *.safetensors, as Hugging Face repositories do"
LFS_POINTER = b"version https://git-lfs"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_MAX_INDEX_BYTES = 64 * 2**20


def explain_no_config(folder: Path) -> str:
    """The message for a folder without config.json."""
    start = f"model folder {folder} has no config.json"
    if (folder / "adapter_config.json").is_file():
        return f"{start}: it {explain_adapter(folder)}"
    if (folder / "model_index.json").is_file():
        return f"{start} but a model_index.json: it is a diffusers pipeline; give a language model"
    if (folder / "snapshots").is_dir() and folder.name.startswith("models--"):
        name = folder.name[8:].replace("--", "/")
        return f"{start}: it is a repository of the Hugging Face cache; give its name, {name}, instead"
    if _is_sentence_transformer(folder):
        return f"{start}: it {_SENTENCES}"
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    if gguf:
        return (
            f"{start} but {gguf[0]}{f' and {len(gguf) - 1} more' if len(gguf) > 1 else ''}: `moesaic inspect "
            f"{folder / gguf[0]}` reads a GGUF file; to run the model, give its folder of safetensors"
        )
    if (folder / "params.json").is_file():
        return f"{start} but a params.json: it is in its maker's own format; {RULE}"
    below = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if below:
        more = f" (or {', '.join(below[1:4])})" if len(below) > 1 else ""
        return f"{start}, but {below[0]} in it has one{more}: give {folder / below[0]}"
    if any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        return f"{start}: it holds a tokenizer and no model; {RULE}"
    return f"{start}; {RULE}"


def check_runnable(folder: Path, config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Refuse a folder whose weights cannot be run, before anything heavy is imported; `spec` is its config's.

    Raises: CheckpointError or UnsupportedModelError that says what was found, the rule, and what to do.
    """
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(f"{folder} {explain_adapter(folder)}")
    if _is_sentence_transformer(folder):
        raise UnsupportedModelError(f"{folder} {_SENTENCES}")
    if config.get("auto_map") and spec.reader == "generic":
        raise UnsupportedModelError(
            f"{folder}: model_type {config.get('model_type')!r} comes with code of its own (auto_map in "
            "config.json), and code of a checkpoint is never run here. A model of a known architecture is "
            "needed: docs/models.md lists them"
        )
    _check_quantised(folder, config, spec)
    for name in ("tokenizer.json", INDEX_FILE):
        check_pointer(folder / name)
    for path in sorted(folder.glob("*.safetensors")):
        check_pointer(path)
    missing = missing_files(folder)
    if missing:
        raise CheckpointError(
            f"{folder / INDEX_FILE} lists {len(missing)} files that are not in the folder: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}; copy or download them"
        )
    pickles = pickle_names(folder)
    if pickles and not any(folder.glob("*.safetensors")):
        raise CheckpointError(explain_pickles(folder, pickles))


def pickle_names(folder: Path) -> list[str]:
    """Weight files in Python's pickle format."""
    return sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))


def explain_pickles(folder: Path, names: list[str]) -> str:
    """The message for a folder whose weights are pickles."""
    return (
        f"{folder} holds its weights as pickle ({', '.join(names[:3])}), which can run code when opened and "
        "is never read; convert it with transformers: "
        "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT)"
    )


def missing_files(folder: Path) -> tuple[str, ...]:
    """Weight files that the index names and the folder lacks; none without an index.

    Raises: CheckpointError for an index that is no index.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return ()
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise CheckpointError(f"{index} is too large for an index: at most {_MAX_INDEX_BYTES} bytes")
        content = json.loads(index.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is not the JSON of an index: {error!r}") from error
    placed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise CheckpointError(f"{index}: weight_map must be a JSON object of file names")
    return tuple(sorted(name for name in set(placed.values()) if not (folder / name).exists()))


_SENTENCES = (
    "holds a sentence-transformers model (modules.json), which turns a text into one vector and generates "
    "nothing; give a language model"
)


def _is_sentence_transformer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("modules.json", "config_sentence_transformers.json"))


def explain_adapter(folder: Path) -> str:
    """The rest of a message that begins with the folder."""
    base = ""
    try:
        content = json.loads((folder / "adapter_config.json").read_bytes())
        named = content.get("base_model_name_or_path") if isinstance(content, dict) else None
        base = f" of {named[:80]}" if isinstance(named, str) else ""
    except (OSError, ValueError, RecursionError):
        pass  # what it says is a help, not a need
    return (
        f"holds an adapter{base} (adapter_config.json), not a whole model; merge it into its base model "
        "first (peft: merge_and_unload) or, if the weights are merged already, remove the adapter's files"
    )


def _check_quantised(folder: Path, config: Mapping[str, Any], spec: ModelSpec) -> None:
    quant = config.get("quantization_config")
    if isinstance(quant, Mapping) and quant.get("quant_method") and spec.stored and spec.runnable_reasons:
        others = [reason for reason in spec.runnable_reasons if not reason.startswith(STORED_AS)]
        way = "give the unquantised checkpoint (float32, bfloat16 or float16)"
        if others:
            way = f"nor is an unquantised one run: {'; '.join(others)}"
        raise UnsupportedModelError(
            f"{folder}: quantization_config in config.json says that the weights are stored as "
            f"{str(quant['quant_method'])[:40]}, which is not run yet; {way}. `moesaic inspect` reads "
            "this one"
        )


def check_pointer(path: Path) -> None:
    """Refuse a file of which only the Git LFS pointer was fetched.

    Raises: CheckpointError with the command that fetches it.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(len(LFS_POINTER))
    except OSError:
        return  # absent or unreadable: whoever needs the file says so
    if start == LFS_POINTER:
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file: fetch it with `git lfs pull` in {path.parent}"
        )


def refuse_gguf(path: Path) -> ConfigError:
    """The error for a GGUF file where a folder is due."""
    return ConfigError(
        f"{path} is a GGUF file, whose weights are not run yet: `moesaic inspect` reads what it "
        "says of itself; to run the model, give its folder of safetensors"
    )
