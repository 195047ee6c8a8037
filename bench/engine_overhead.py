"""Time of a decode step outside the forward pass: planning, layout, counting experts, sampling, committing.

The model is a stub that answers at once: 16 MoE layers of 64 experts, top-8, and logits like a language
model's (a few likely tokens over a flat rest). Prints median and range in milliseconds; `--json` for
programs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median

import torch

from moesaic.audit.bench.report import describe_machine, describe_versions, load_average
from moesaic.engine.runner import Runner
from moesaic.engine.worker import Worker
from moesaic.experts.contract import Routing
from moesaic.kv.pool import KvPool
from moesaic.sched.key import KvKeyScope
from moesaic.sched.ledger import KvLedger, cache_groups
from moesaic.sched.request import Request, SamplingParams
from moesaic.sched.scheduler import Limits, Scheduler
from moesaic.spec.model import GateSpec, GqaSpec, LayerSpec, ModelSpec, MoeSpec
from moesaic.spec.numerics import preset

NUM_LAYERS, NUM_EXPERTS, TOP_K = 16, 64, 8
LIMITS_MS = {"greedy": 2.0, "top_p": 6.0}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k_top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "greedy_logprobs_5": {"temperature": 0.0, "logprobs": 5},
    "penalties_top_p": {
        "temperature": 0.8,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
    },
}


class StubDecoder:
    """Routes at random, once drawn, and gives the same logits at every step."""

    def __init__(self, batch: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        chosen = torch.stack(
            [torch.randperm(NUM_EXPERTS, generator=generator)[:TOP_K].sort().values for _ in range(batch)]
        )
        self._routing = Routing(experts_TK=chosen, weights_TK=torch.full(chosen.shape, 1 / TOP_K))
        self._logits_BV = torch.randn((batch, vocab), generator=generator)
        self._logits_BV[:, :200] += torch.linspace(12.0, 4.0, 200)

    def forward(self, tokens_T, layout, pool, tag, observe):
        """A step that takes no time."""
        num_tokens = len(tokens_T)
        routing = Routing(
            experts_TK=self._routing.experts_TK[:num_tokens], weights_TK=self._routing.weights_TK[:num_tokens]
        )
        for moe_idx in range(NUM_LAYERS):
            observe(moe_idx, routing)
        return torch.zeros((num_tokens, 1))
        yield  # a forward is a generator

    def logits(self, hidden_BD):
        """Ready-made rows."""
        return self._logits_BV[: len(hidden_BD)]


def model_spec(vocab: int) -> ModelSpec:
    """Facts of the stub; only counts matter."""
    moe = MoeSpec(
        num_experts=NUM_EXPERTS,
        experts_per_token=TOP_K,
        expert_width=8,
        gate=GateSpec(score="softmax"),
        shared=None,
        row_width=8,
    )
    mixer = GqaSpec(num_heads=1, num_kv_heads=1, head_dim=8, rope=None, softmax_scale=1.0)
    return ModelSpec(
        model_type="stub",
        family="stub",
        reader="exact",
        hidden=8,
        vocab=vocab,
        layers=tuple(LayerSpec(mixer=mixer, ffn=moe) for _ in range(NUM_LAYERS)),
        norm_eps=1e-6,
        max_position=4096,
        dtype="float32",
        has_tied_head=False,
        weight_format="float32",
    )


def measure(
    sampling: dict[str, float], batch: int, vocab: int, prompt_len: int, num_steps: int
) -> list[float]:
    """Seconds of each decode step, the first few left out."""
    spec, numerics = model_spec(vocab), preset("portable", dtype="float32")
    groups = cache_groups(spec, numerics.kv_format, numerics.kv_block)
    num_blocks = batch * -(-(prompt_len + num_steps + 16) // numerics.kv_block)
    scope = KvKeyScope(model_digest="", numerics_digest="", tokenizer_digest="", positions="")
    ledger = KvLedger(groups, (num_blocks,), kv_block=numerics.kv_block, scope=scope)
    whole = batch * prompt_len  # all prompts in one step
    limits = Limits(max_num_seqs=batch, max_tokens_per_step=whole, max_model_len=4096, max_waiting=batch)
    scheduler = Scheduler(ledger, limits)
    runner = Runner(StubDecoder(batch, vocab), KvPool(spec, numerics, (num_blocks,)))
    worker = Worker(runner, spec)
    for i in range(batch):
        request = Request(
            request_id=f"r{i}",
            prompt_ids=tuple(range(i, i + prompt_len)),
            sampling=SamplingParams(**sampling, ignore_eos=True, max_tokens=num_steps + 8),
            seed=i,
        )
        scheduler.add(request, 0.0)
    times = []
    while True:
        began_s = time.perf_counter()
        plan = scheduler.schedule(began_s)
        if plan is None:
            return times[4:]
        scheduler.commit(worker.run(plan), time.perf_counter())
        if all(row.num_tokens == 1 for row in plan.batches[0].rows) and len(plan.batches[0].rows) == batch:
            times.append(time.perf_counter() - began_s)


def main() -> None:
    """Measure every way of sampling; exit 3 when greedy or top-p takes longer than its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = load_average()
    figures = {}
    for name, sampling in SAMPLINGS.items():
        times = measure(sampling, arguments.batch, arguments.vocab, arguments.prompt_len, arguments.steps)
        figures[name] = {
            "step_ms_median": 1e3 * median(times),
            "step_ms_min": 1e3 * min(times),
            "step_ms_max": 1e3 * max(times),
            "limit_ms": LIMITS_MS.get(name),
        }
        if not arguments.json:
            figure = figures[name]
            print(
                f"{name:20s} {figure['step_ms_median']:7.2f} ms "
                f"[{figure['step_ms_min']:.2f} .. {figure['step_ms_max']:.2f}] "
                f"limit {figure['limit_ms'] or '-'}"
            )
    result = {
        "figures": figures,
        "batch": arguments.batch,
        "vocab": arguments.vocab,
        "load_before": before,
        "machine": describe_machine(),
        "versions": describe_versions(),
    }
    print(json.dumps(result, indent=2) if arguments.json else f"{result['machine']} load {before:.1f}")
    is_over = any(f["limit_ms"] is not None and f["step_ms_median"] > f["limit_ms"] for f in figures.values())
    sys.exit(3 if is_over else 0)


if __name__ == "__main__":
    main()
