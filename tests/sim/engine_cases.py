"""Small simulated engines, so that every test of them states only what it varies."""

from __future__ import annotations

from functools import cache

from moesaic.cost.layouts import Split
from moesaic.cost.load import EVEN
from moesaic.cost.ops import Formats
from moesaic.cost.profile import PAPER
from moesaic.planner.sim.engine import EngineCase
from moesaic.planner.sim.step_time import StepCase
from moesaic.sched.scheduler import Limits
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster
from moesaic.spec.locate import locate
from moesaic.spec.workload import TraceRow


@cache
def model(name: str):
    return read_config(locate(name).config, name=name)


def engine_case(
    *,
    name: str = "olmoe-1b-7b",
    split: Split | None = None,
    machines: str = "h200",
    max_num_seqs: int = 8,
    max_tokens: int = 256,
    max_model_len: int = 2048,
    max_waiting: int = 10**9,
    kv_tokens: int | None = 8192,
    has_prefix_cache: bool = True,
) -> EngineCase:
    """An engine of a small model, whose KV pool has room for `kv_tokens`."""
    spec = model(name)
    token_bytes = sum(cache.bytes_per_token for layer in spec.layers for cache in layer.caches("bfloat16"))
    return EngineCase(
        step=StepCase(
            model=spec,
            cluster=cluster(machines),
            split=split or Split(),
            profile=PAPER,
            formats=Formats(),
            shares=EVEN,
        ),
        limits=Limits(
            max_num_seqs=max_num_seqs,
            max_tokens_per_step=max_tokens,
            max_model_len=max_model_len,
            max_waiting=max_waiting,
        ),
        has_prefix_cache=has_prefix_cache,
        kv_pool_bytes=None if kv_tokens is None else kv_tokens * token_bytes,
    )


def row(at_s: float, prompt: int, output: int, ids: tuple[int, ...] = ()) -> TraceRow:
    return TraceRow(at_s=at_s, prompt_tokens=prompt, output_tokens=output, hash_ids=ids)
