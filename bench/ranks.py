"""Decode speed of several ranks with one thread each, next to one process with as many threads.

With --tp: of ranks that share attention over memory, next to the same ranks over gloo.

Each engine runs in a process tree of its own, in turn, `--rounds` times. All decode as many tokens greedily
after prompts of the same length, through `moesaic.LLM`: scheduler, sampling and the pipes to the ranks are
counted. Prompts are other ones in every run, so that nothing is cached.

    python bench/ranks.py demo
    python bench/ranks.py FOLDER --format int4-g32 --json
    python bench/ranks.py demo --tp 2
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import numpy as np
from engine_times import run_batch
from table import describe, spread

from moesaic.audit.bench.report import load_average
from moesaic.engine.llm import LLM
from moesaic.spec.locate import locate

GOAL, TP_GOAL = 0.9, 1.0
PROMPT_LEN = 32


def rate(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Tokens a second from the moment at which every request has its first one."""
    times = run_batch(llm, prompts, num_tokens)
    return len(prompts) * (num_tokens - 1) / (times.last_s - times.first_s)


def child(args: argparse.Namespace) -> dict[str, Any]:
    """The rates of one engine; the first run warms up."""
    options = {"num_ranks": args.ranks, "num_threads": args.threads, "format": args.format}
    if args.tp is not None:
        leaves = 1 << (args.tp - 1).bit_length()
        options |= {"tp": args.tp, "tp_wires": args.tp_wires, "matmul_shards": leaves}
    with LLM(args.model, max_num_seqs=args.batch, max_model_len=PROMPT_LEN + args.tokens, **options) as llm:
        active = llm.engine.snapshot().active
        rates = []
        for run in range(args.runs + 1):
            draw = np.random.default_rng([args.seed, run])
            prompts = draw.integers(2, active["vocab"], size=(args.batch, PROMPT_LEN)).tolist()
            rates.append(rate(llm, prompts, args.tokens))
        return {"rates": rates[1:], "layout": active["layout"], "backend": active["backend"]}


def run_child(args: argparse.Namespace, engine: dict[str, Any], seed: int) -> dict[str, Any]:
    """One engine in processes of its own."""
    command = [sys.executable, __file__, args.model, "--child", "--seed", str(seed)]
    given = {name: getattr(args, name) for name in ("threads", "batch", "tokens", "runs", "format")} | engine
    for name, value in given.items():
        command += [] if value is None else [f"--{name}", str(value)]
    print(f"measuring {' '.join(f'{name} {value}' for name, value in engine.items())}", file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def name_of(layout: dict[str, Any], threads: int) -> str:
    """What an engine is called in the table."""
    ranks = layout["num_ranks"]
    if ranks == 1:
        return f"one process, {threads} threads"
    how = f"{layout['dispatcher']}{' fused' if layout['is_fused'] else ''}"
    how += f", tp over {layout['tp_wires']}" if layout["tp_wires"] else ""
    return f"{ranks} ranks of {threads // ranks}, {how}"


def main() -> None:
    """Print the comparison, or JSON for bench/results; exit code 3 where the goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder, or demo")
    parser.add_argument("--format", help="of the weights; default: the checkpoint's own")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--tp", type=int, help="ranks of a replica: compare their wires, gloo and shared memory"
    )
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3, help="of each engine and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    for hidden, kind in (("--tp-wires", str), ("--seed", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args)))
        return
    locate(args.model)  # before anything is started
    before = load_average()
    if args.tp is None:
        engines: list[dict[str, Any]] = [{"ranks": 1}, {"ranks": args.ranks}]
    else:
        both = {"ranks": args.ranks, "tp": args.tp}
        engines = [both | {"tp-wires": wires} for wires in ("gloo", "shared_memory")]
    rates: dict[str, list[float]] = {}
    for round_ in range(args.rounds):
        for engine in engines:
            found = run_child(args, engine, round_)
            rates.setdefault(name_of(found["layout"], args.threads), []).extend(found["rates"])
    spreads = [spread(of) for of in rates.values()]
    ratio, goal = spreads[1]["median"] / spreads[0]["median"], GOAL if args.tp is None else TP_GOAL
    name = f"{args.model.rstrip('/').rsplit('/', 1)[-1]} {args.format or ''}".strip()
    if args.json:
        verdict = "met" if ratio >= goal else f"short of {goal:g}x"
        first, second = rates
        result = describe(
            f"{name}, decode: {second}, next to {first}",
            ["batch", *(f"{one}: tokens/s" for one in rates), "ratio", ""],
            [[args.batch, *spreads, f"{ratio:.2f}", verdict]],
            [f"Prompts of {PROMPT_LEN} tokens, {args.tokens} more; load {before:.1f} before."],
        )
        print(json.dumps(result, indent=2))
    else:
        print(f"{name}, batch {args.batch}, load {before:.1f}: tokens/s")
        for one, of in zip(rates, spreads, strict=True):
            print(f"  {one:<46} {of['median']:.1f} ({of['min']:.1f} to {of['max']:.1f})")
        print(f"  ratio {ratio:.2f}, goal {goal:g}")
    sys.exit(0 if ratio >= goal else 3)


if __name__ == "__main__":
    main()
