"""Decode speed of several ranks with one thread each, next to one process with as many threads.

Each engine runs in a process tree of its own, in turn, `--rounds` times. All decode as many tokens greedily
after prompts of the same length, through `moesaic.LLM`: scheduler, sampling and the pipes to the ranks are
counted. Prompts are other ones in every run, so that nothing is cached.

    python bench/ranks.py demo
    python bench/ranks.py FOLDER --format int4-g32 --json
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

GOAL = 0.9
PROMPT_LEN = 32


def rate(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Tokens a second from the moment at which every request has its first one."""
    times = run_batch(llm, prompts, num_tokens)
    return len(prompts) * (num_tokens - 1) / (times.last_s - times.first_s)


def child(args: argparse.Namespace) -> dict[str, Any]:
    """The rates of one engine; the first run warms up."""
    options = {"num_ranks": args.ranks, "num_threads": args.threads, "format": args.format}
    with LLM(args.model, max_num_seqs=args.batch, max_model_len=PROMPT_LEN + args.tokens, **options) as llm:
        active = llm.engine.snapshot().active
        rates = []
        for run in range(args.runs + 1):
            draw = np.random.default_rng([args.seed, run])
            prompts = draw.integers(2, active["vocab"], size=(args.batch, PROMPT_LEN)).tolist()
            rates.append(rate(llm, prompts, args.tokens))
        return {"rates": rates[1:], "layout": active["layout"], "backend": active["backend"]}


def run_child(args: argparse.Namespace, ranks: int, seed: int) -> dict[str, Any]:
    """One engine in processes of its own."""
    command = [sys.executable, __file__, args.model, "--child", "--seed", str(seed), "--ranks", str(ranks)]
    for name in ("threads", "batch", "tokens", "runs"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--format", args.format] if args.format else []
    print(f"measuring {ranks} rank{'s' * (ranks > 1)}", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the comparison, or JSON for bench/results; exit code 3 where the goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder, or demo")
    parser.add_argument("--format", help="of the weights; default: the checkpoint's own")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3, help="of each engine and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args)))
        return
    locate(args.model)  # before anything is started
    before = load_average()
    rates: dict[int, list[float]] = {1: [], args.ranks: []}
    layout: dict[str, Any] = {}
    for round_ in range(args.rounds):
        for ranks, samples in rates.items():
            found = run_child(args, ranks, round_)
            samples += found["rates"]
            layout = found["layout"]
    spreads = [spread(of) for of in rates.values()]
    ratio = spreads[1]["median"] / spreads[0]["median"]
    each = args.threads // args.ranks
    how = f"{layout['dispatcher']}{' fused' if layout['is_fused'] else ''}"
    name = f"{args.model.rstrip('/').rsplit('/', 1)[-1]} {args.format or ''}".strip()
    if args.json:
        verdict = "met" if ratio >= GOAL else f"short of {GOAL:g}x"
        result = describe(
            f"{name}: {args.ranks} ranks of {each} thread next to one process, decode",
            [
                "batch",
                f"one process, {args.threads} threads: tokens/s",
                f"{args.ranks} ranks, {how}: tokens/s",
                "ratio",
                "",
            ],
            [[args.batch, *spreads, f"{ratio:.2f}", verdict]],
            [f"Prompts of {PROMPT_LEN} tokens, {args.tokens} more; load {before:.1f} before."],
        )
        print(json.dumps(result, indent=2))
    else:
        alone, several = (f"{of['median']:.1f} ({of['min']:.1f} to {of['max']:.1f})" for of in spreads)
        print(f"{name}, batch {args.batch}, load {before:.1f}: tokens/s")
        print(f"  one process, {args.threads} threads      {alone}")
        print(f"  {args.ranks} ranks of {each}, {how}  {several}")
        print(f"  ratio {ratio:.2f}, goal {GOAL:g}")
    sys.exit(0 if ratio >= GOAL else 3)


if __name__ == "__main__":
    main()
