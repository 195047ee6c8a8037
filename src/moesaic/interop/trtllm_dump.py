"""TensorRT-LLM's expert statistics: meta_info.json and safetensors by rank with `<iteration>_<layer>` keys.

Source: documentation and tools of TensorRT-LLM (report_load_statistics.py); no release was run.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from moesaic.errors import ConfigError
from moesaic.interop.dump import Dump, checked, read_json
from moesaic.spec.safetensors import read_header

META = "meta_info.json"
_KEY = re.compile(r"(\d+)_(\d+)")
_DTYPES = {"I64": "<i8", "I32": "<i4", "F32": "<f4", "F64": "<f8"}


def read_trtllm(folder: Path) -> Dump:
    """All ranks' counts, added up over iterations.

    Raises: ConfigError when the folder lacks one of the two, or a tensor does not have the experts of
             meta_info.
    """
    meta = read_json(folder / META)
    num_experts = meta.get("num_experts") if isinstance(meta, dict) else None
    if not isinstance(num_experts, int) or num_experts < 1:
        raise ConfigError(
            f"{folder / META}: num_experts must be a whole number of at least 1, got {num_experts!r}"
        )
    top_k = meta.get("num_experts_per_token")
    files = sorted(file for file in folder.glob("*.safetensors") if not file.stem.endswith("_raw"))
    if not files:
        raise ConfigError(f"{folder}: {META}, but no rank's .safetensors; copy the whole folder")
    layers: dict[int, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    iterations: dict[int, bool] = {}
    counted: dict[int, set[tuple[int, int]]] = {}  # by rank
    for file in files:
        own = counted.setdefault(_rank(file), set())
        for tensor in read_header(file):
            match = _KEY.fullmatch(tensor.name)
            if match is None:
                continue  # token ids and the like
            if tensor.num_items != num_experts or tensor.dtype not in _DTYPES:
                raise ConfigError(
                    f"{file}: {tensor.name} is {tensor.dtype} {list(tensor.shape)}; {META} says "
                    f"{num_experts} experts, "
                    f"and counts are {', '.join(_DTYPES)}"
                )
            iteration, layer = int(match[1]), int(match[2])
            own.add((iteration, layer))
            counts = np.fromfile(file, _DTYPES[tensor.dtype], num_experts, offset=tensor.start).astype(
                np.float64
            )
            layers[layer] = layers.get(layer, np.zeros(num_experts)) + counts
            iterations[iteration] = iterations.get(iteration, False) or bool(counts.any())
    if not layers:
        raise ConfigError(f"{folder}: no tensor is called <iteration>_<layer>; is it a statistics folder?")
    idxs = tuple(sorted(layers))
    zero = sum(not is_used for is_used in iterations.values())
    return checked(
        Dump(
            source=str(folder),
            layout="TensorRT-LLM statistics",
            layer_idxs=idxs,
            counts_LE=np.stack([layers[idx] for idx in idxs]),
            num_steps=len(iterations) - zero,
            num_zero_steps=zero,
            ranks=tuple(sorted(counted)),
            short_ranks=_short(counted),
            top_k=top_k if isinstance(top_k, int) and top_k > 0 else None,
        )
    )


def _short(counted: dict[int, set[tuple[int, int]]]) -> tuple[int, ...]:
    """Ranks whose file lacks counts that another rank's has."""
    most = set().union(*counted.values())
    return tuple(sorted(rank for rank, own in counted.items() if own != most))


def _rank(file: Path) -> int:
    numbers = re.findall(r"\d+", file.stem)
    if not numbers:
        raise ConfigError(f"{file}: its name has no rank; TensorRT-LLM writes rank0.safetensors and so on")
    return int(numbers[-1])
