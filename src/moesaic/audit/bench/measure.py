"""Drive a client through a workload, closed loop by concurrency or open loop by arrival time; then repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from moesaic.audit.bench.client import Client
from moesaic.audit.bench.timing import Run, Timing, summarise
from moesaic.audit.bench.workload import Item, Load, Workload, with_arrivals
from moesaic.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How often, and how hard."""

    num_runs: int = 3
    num_warmups: int = 1
    concurrency: int | None = None  # requests in flight at most; None: no limit
    request_rate: float | None = None  # per second, Poisson; None: by the trace, or as soon as possible
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_runs < 1:
            raise ConfigError(f"runs must be at least 1, got {self.num_runs}")
        if self.num_warmups < 0:
            raise ConfigError(f"warmup must be at least 0, got {self.num_warmups}")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The runs of one benchmark, warm-up left out."""

    workload: Workload  # of the first run
    runs: tuple[Run, ...]


async def measure(client: Client, load: Load, plan: Plan, progress: Callable[[str], None]) -> Measured:
    """Warm up, then run `plan.num_runs` times, one after the other.

    Raises: ConfigError when the client refuses the workload.
    """
    for warmup_idx in range(plan.num_warmups):
        progress(f"warm-up {warmup_idx + 1} of {plan.num_warmups}")
        items = load.workload(-1 - warmup_idx & 0xFFFF).items[: plan.concurrency or 1]
        await drive(client, tuple(_now(item) for item in items), plan.concurrency, f"warmup-{warmup_idx}")
    runs = []
    for run_idx in range(plan.num_runs):
        progress(f"run {run_idx + 1} of {plan.num_runs}")
        workload = load.workload(run_idx)
        if plan.request_rate is not None:
            workload = with_arrivals(workload, plan.request_rate, plan.seed)
        if run_idx == 0:
            first = workload
        timings = await drive(client, workload.items, plan.concurrency, f"run-{run_idx}")
        runs.append(summarise(timings))
    return Measured(workload=first, runs=tuple(runs))


async def drive(client: Client, items: tuple[Item, ...], concurrency: int | None, salt: str) -> list[Timing]:
    """Send all items, each at its time and never more than `concurrency` at once; timings in item order."""
    places = asyncio.Semaphore(concurrency if concurrency is not None else len(items))
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    async def one(item: Item) -> Timing:
        if item.at_s is not None:
            await asyncio.sleep(max(0.0, start_s + item.at_s - loop.time()))
        async with places:
            return await client.send(item, salt)

    tasks = [asyncio.create_task(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _now(item: Item) -> Item:
    return Item(prompt=item.prompt, output_len=item.output_len)
