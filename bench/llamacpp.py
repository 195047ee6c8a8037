"""llama.cpp's own benchmarks, run on a checkpoint of OLMoE's shape."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from olmoe_files import write_gguf

GGUF_TYPES = {"int4-g32": "Q4_0", "int8-g32": "Q8_0", "bfloat16": "BF16"}
"""llama.cpp's type with as many bits per weight as ours."""


def quantised(programs: Path, folder: Path, format: str) -> Path:
    """The checkpoint as a GGUF with as many bits per weight as `format`; made beside it, once.

    All matrices get the type, the head and the embedding too; llama-quantize would keep the head in Q6_K.
    """
    whole = folder / "BF16.gguf"
    if not whole.exists():
        write_gguf(folder, whole)
    kind = GGUF_TYPES[format]
    path = folder / f"{kind}.gguf"
    if not path.exists():
        command = [programs / "llama-quantize", "--pure", "--output-tensor-type", kind, whole, path, kind]
        subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
    return path


def measure_llamacpp(
    programs: Path,
    gguf: Path,
    *,
    threads: int,
    batches: Sequence[int],
    prompt: int,
    decode: int,
    prefill: int,
    runs: int,
) -> dict[str, list[float]]:
    """The figures of decode_vs_peers.py, each `runs` times after a warm-up."""
    found: dict[str, list[float]] = {}
    shared = ["-m", str(gguf), "-t", str(threads)]
    sizes = ["-npp", str(prompt), "-ntg", str(decode), "-npl", ",".join(map(str, batches))]
    room = ["-c", str(max(batches) * (prompt + decode + 64)), "-b", "2048", "-ub", "512"]
    for run in range(-1, runs):
        text = _run(
            [str(programs / "llama-batched-bench"), *shared, *sizes, *room, "--output-format", "jsonl"]
        )
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        for row in rows if run >= 0 else ():
            found.setdefault(f"decode_tokens_per_s_batch_{row['pl']}", []).append(row["speed_tg"])
    text = _run(
        [str(programs / "llama-bench"), *shared, "-p", str(prefill), "-n", "0", "-r", str(runs), "-o", "json"]
    )
    found[f"prefill_tokens_per_s_{prefill}"] = json.loads(text)[0]["samples_ts"]
    return found


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
