"""How long the collectives of gloo take between processes of this machine, by size.

A program of its own, run by `calibrate`. It starts the ranks and takes rank 0's times; one process does not
tell the others how it went but by ending.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from moesaic.errors import MoesaicError
from moesaic.kernels.measure.child import Say, serve

SIZES = (1024, 16 * 1024, 128 * 1024, 2**20, 4 * 2**20, 16 * 2**20)
OPS = ("send_recv", "all_to_all_single", "all_reduce")
NUM_LOOPS = 9  # times of each size, each the mean of calls made in a row
WAIT_S = 60.0  # guess: longer than any call here, shorter than a person's patience


def measure(told: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Seconds of each collective over groups of `worlds` processes, with one thread each.

    Units:  `bytes` is what a rank sends to others in an all_to_all_single, else the message or the tensor.
    Raises: MoesaicError when a process ended before its time.
    """
    sizes, readings = told.get("sizes") or SIZES, []
    for world in told["worlds"]:
        say(f"collectives between {world} processes")
        budget_s = float(told["budget_s"]) / (len(told["worlds"]) * len(sizes) * len(OPS) * NUM_LOOPS)
        readings += _in_processes(int(world), [int(size) for size in sizes], budget_s)
    return {"readings": readings, "missing": {}}


def _in_processes(world: int, sizes: list[int], budget_s: float) -> list[dict[str, Any]]:
    # Forked ranks have torch already, whose import is most of what a new process would do.
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    found: SimpleQueue[list[dict[str, Any]]] = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'ranks'}"
        ranks = [
            context.Process(target=_rank, args=(rank, world, store, sizes, budget_s, found), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        while found.empty() and all(process.exitcode in (None, 0) for process in ranks):
            time.sleep(0.05)
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode not in (None, 0)]
        readings = [] if failed else found.get()
        for process in ranks:
            if failed:
                process.kill()
            process.join()
    if failed:
        raise MoesaicError(f"process {failed[0]} of {world} ended before it had measured anything")
    return readings


def _rank(
    rank: int, world: int, store: str, sizes: list[int], budget_s: float,
    found: SimpleQueue[list[dict[str, Any]]],
) -> None:  # fmt: skip
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=WAIT_S)
    )
    readings = []
    for op in OPS:
        for size in sizes:
            call, num_bytes = _call_of(op, size, rank, world)
            num_turns = 2 if op == "send_recv" else 1  # there and back
            readings.append({
                "case": {"op": op, "processes": world, "bytes": num_bytes}, "unit": "s",
                "values": [seconds / num_turns for seconds in _times(call, budget_s)],
            })  # fmt: skip
    if rank == 0:
        found.put(readings)
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """However the program ends, killed too, no rank waits on for another."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are started by the program"
    parent.join()
    os._exit(1)


def _call_of(op: str, size: int, rank: int, world: int) -> tuple[Callable[[], object], int]:
    """One collective on a tensor of `size` bytes, and the bytes that count for it."""
    own, other = torch.zeros(size // 4), torch.zeros(size // 4)
    if op == "all_reduce":
        return lambda: dist.all_reduce(own), size
    if op == "all_to_all_single":
        return lambda: dist.all_to_all_single(other, own), size * (world - 1) // world
    if rank > 1:
        return lambda: None, size
    return lambda: _there_and_back(own, other, rank), size


def _there_and_back(own: Tensor, other: Tensor, rank: int) -> None:
    """A message to the other of ranks 0 and 1, and one from it."""
    if rank == 0:
        dist.send(own, 1)
        dist.recv(other, 1)
    else:
        dist.recv(other, 0)
        dist.send(own, 0)


def _times(call: Callable[[], object], budget_s: float) -> list[float]:
    """Means over calls in a row: each call waits for the other ranks, so none gets ahead."""
    trial_s = torch.tensor([_loop_s(call, 2)])
    dist.broadcast(trial_s, 0)  # all ranks must make equally many calls
    num_calls = max(1, min(1000, int(budget_s / float(trial_s))))
    times = []
    for _ in range(NUM_LOOPS):
        dist.barrier()
        times.append(_loop_s(call, num_calls))
    return times


def _loop_s(call: Callable[[], object], num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls


if __name__ == "__main__":
    serve(measure)
