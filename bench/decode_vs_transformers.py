"""Decode and prefill speed next to transformers, on a random checkpoint of OLMoE's shape, made on the spot.

Each engine runs in a process of its own, in turn, so that the two never share memory; transformers runs
with its `eager` and its `grouped_mm` experts, and the better one counts, figure by figure (`batched_mm`
copies the weights of every choice: 50 GB for a prefill of 512 tokens). Both decode as many tokens after
prompts of the same length, greedily, without stopping. The default checkpoint has 7.1 GB, which
transformers holds twice while loading. Weights are random, so routing is nearly uniform: at batch 16 every
expert is read.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

DECODE_PROMPT_LEN = 32
IMPLEMENTATIONS = ("eager", "grouped_mm")


def olmoe_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """OLMoE-1B-7B with fewer layers. Source: allenai/OLMoE-1B-7B-0125, config.json."""
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.expert_width,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": arguments.experts,
        "num_experts_per_tok": min(8, arguments.experts),
        "norm_topk_prob": False,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "clip_qkv": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": arguments.vocab,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "torch_dtype": "bfloat16",
    }


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """One shard per layer, each written before the next is made: a layer's memory is enough."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    num_files = config["num_hidden_layers"] + 1
    weight_map: dict[str, str] = {}
    total_bytes = 0

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(1 / math.sqrt(shape[-1])).bfloat16()

    def save(idx: int, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal total_bytes
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        name = f"model-{idx + 1:05d}-of-{num_files:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors = {f"{prefix}.self_attn.{name}_proj.weight": random(D, D) for name in "qkvo"}
        for name in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(D, dtype=torch.bfloat16)
        tensors[f"{prefix}.mlp.gate.weight"] = random(config["num_experts"], D)
        for expert in range(config["num_experts"]):
            for name, shape in {"gate": (F, D), "up": (F, D), "down": (D, F)}.items():
                tensors[f"{prefix}.mlp.experts.{expert}.{name}_proj.weight"] = random(*shape)
        save(layer, tensors)
    norm = torch.ones(D, dtype=torch.bfloat16)
    save(
        num_files - 1,
        {
            "model.embed_tokens.weight": random(V, D),
            "lm_head.weight": random(V, D),
            "model.norm.weight": norm,
        },
    )
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def prompts(batch: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Random token ids; another seed for every repetition, so that nothing is cached."""
    import numpy as np

    return np.random.default_rng([seed, batch]).integers(2, vocab, size=(batch, length)).tolist()


def measure_moesaic(arguments: argparse.Namespace) -> dict[str, Any]:
    """Through `moesaic.LLM`, scheduler, sampling and all; times are those of the engine's own events."""
    import threading

    from moesaic.engine.llm import LLM
    from moesaic.sched.request import Request, SamplingParams

    def run(llm: LLM, batch: list[list[int]], num_tokens: int) -> tuple[float, float, float]:
        """(start, first tokens of all there, last token)."""
        arrivals: dict[str, list[float]] = {f"r{i}": [] for i in range(len(batch))}
        left, done = set(arrivals), threading.Event()

        def on_event(event: Any) -> None:
            if event.token_ids:
                arrivals[event.request_id].append(time.perf_counter())
            if event.finish_reason is not None:
                left.discard(event.request_id)
                if not left:
                    done.set()

        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        start_s = time.perf_counter()
        for i, prompt in enumerate(batch):
            llm.engine.submit(
                Request(request_id=f"r{i}", prompt_ids=tuple(prompt), sampling=sampling, seed=0), on_event
            )
        done.wait()
        return start_s, max(times[0] for times in arrivals.values()), max(t[-1] for t in arrivals.values())

    options = {
        "num_threads": arguments.threads,
        "max_num_seqs": max(arguments.batches),
        "max_model_len": 2048,
    }
    with LLM(arguments.folder, max_tokens_per_step=max(1024, arguments.prefill), **options) as llm:
        active = llm.engine.snapshot().active
        results = collect(
            arguments,
            lambda batch, num_tokens: run(llm, batch, num_tokens),
        )
        return {
            "results": results,
            "numerics_digest": active["numerics_digest"],
            "backend": active["backend"],
        }


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


def collect(arguments: argparse.Namespace, run: Any) -> dict[str, list[float]]:
    """Every figure `runs` times after a warm-up; keys name what was varied."""
    results: dict[str, list[float]] = {}
    for repetition in range(-1, arguments.runs):
        for batch in arguments.batches:
            chosen = prompts(batch, DECODE_PROMPT_LEN, arguments.vocab, repetition + 1)
            _, first_s, end_s = run(chosen, arguments.decode)
            rate = batch * (arguments.decode - 1) / (end_s - first_s)
            if repetition >= 0:
                results.setdefault(f"decode_tokens_per_s_batch_{batch}", []).append(rate)
        chosen = prompts(1, arguments.prefill, arguments.vocab, repetition + 1)
        start_s, first_s, _ = run(chosen, 1)
        if repetition >= 0:
            name = f"prefill_tokens_per_s_{arguments.prefill}"
            results.setdefault(name, []).append(arguments.prefill / (first_s - start_s))
    return results


def run_child(arguments: argparse.Namespace, engine: str, implementation: str = "") -> dict[str, Any] | None:
    """Measure in a process of its own; None when that setting does not run here."""
    command = [sys.executable, __file__, "--child", engine, "--implementation", implementation]
    for name in ("folder", "threads", "decode", "prefill", "runs", "vocab"):
        command += [f"--{name}", str(getattr(arguments, name))]
    command += ["--batches", ",".join(map(str, arguments.batches))]
    print(f"measuring {engine} {implementation}", file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"  failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ours and theirs in turn, `--rounds` times; samples of all rounds together."""
    ours: dict[str, list[float]] = {}
    theirs: dict[str, dict[str, list[float]]] = {name: {} for name in IMPLEMENTATIONS}
    facts: dict[str, Any] = {}
    for _ in range(arguments.rounds):
        found = run_child(arguments, "moesaic")
        if found is None:
            raise SystemExit("moesaic did not run; see above")
        facts = {key: found[key] for key in ("numerics_digest", "backend")}
        _extend(ours, found["results"])
        for name in IMPLEMENTATIONS:
            other = run_child(arguments, "transformers", name)
            if other is not None:
                _extend(theirs[name], other["results"])
    figures = {}
    for key, samples in ours.items():
        medians = {name: median(found[key]) for name, found in theirs.items() if key in found}
        if not medians:
            raise SystemExit("transformers did not run with any setting; see above")
        best = max(medians, key=medians.__getitem__)
        figures[key] = {
            "moesaic": _spread(samples),
            "transformers": _spread(theirs[best][key]),
            "transformers_setting": best,
            "transformers_by_setting": medians,
            "ratio": median(samples) / medians[best],
        }
    return {"figures": figures, **facts}


def _extend(into: dict[str, list[float]], more: dict[str, list[float]]) -> None:
    for key, samples in more.items():
        into.setdefault(key, []).extend(samples)


def _spread(samples: list[float]) -> dict[str, float]:
    return {"median": median(samples), "min": min(samples), "max": max(samples)}


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
    parser.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))), default=(1, 4, 16))
    parser.add_argument("--decode", type=int, default=32, help="tokens per request")
    parser.add_argument("--prefill", type=int, default=512, help="prompt tokens")
    parser.add_argument("--runs", type=int, default=3, help="repetitions per process, after a warm-up")
    parser.add_argument("--rounds", type=int, default=2, help="processes per engine")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=("moesaic", "transformers"), help=argparse.SUPPRESS)
    parser.add_argument("--implementation", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.child:
        child = measure_moesaic if arguments.child == "moesaic" else measure_transformers
        print(json.dumps(child(arguments)))
        return
    if not (arguments.folder / "config.json").is_file():
        print(f"writing the checkpoint to {arguments.folder}", file=sys.stderr)
        write_checkpoint(arguments.folder, olmoe_config(arguments))
    from moesaic.audit.bench.report import describe_machine, describe_versions, load_average

    before = load_average()
    result = compare(arguments)
    from importlib.metadata import version

    result |= {
        "checkpoint": json.loads((arguments.folder / "config.json").read_text()),
        "threads": arguments.threads,
        "routing": "random weights: nearly uniform",
        "machine": describe_machine(),
        "versions": describe_versions() | {"transformers": version("transformers")},
        "load_before": before,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    for key, figure in result["figures"].items():
        ours, theirs = figure["moesaic"], figure["transformers"]
        print(
            f"{key:32s} {ours['median']:8.2f} [{ours['min']:.2f} .. {ours['max']:.2f}]   transformers "
            f"({figure['transformers_setting']}) {theirs['median']:8.2f} "
            f"[{theirs['min']:.2f} .. {theirs['max']:.2f}]   ratio {figure['ratio']:.2f}"
        )
    print(f"{result['machine']['cpu']}, {arguments.threads} threads; load before {before:.1f}")
    print(result["versions"])


if __name__ == "__main__":
    main()
