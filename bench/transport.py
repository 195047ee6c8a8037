"""Time of an exchange of rows and one of results between processes of a machine: gloo beside shared memory.

Every process sends as many bytes to each other one, with one thread each; a time is that of a send and the
collect that answers it, on two lanes, as a dispatcher makes them. Both transports are measured in turn in the
same processes, a block of calls at a time.

    python bench/transport.py
    python bench/transport.py --ranks 4 --json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from table import describe, spread
from torch import distributed as dist

from moesaic.audit.bench.report import load_average
from moesaic.parallel.gloo import GlooTransport
from moesaic.parallel.mesh import Mesh
from moesaic.parallel.segment import LaneSize, Segment, SegmentShape
from moesaic.parallel.shared_memory import SharedMemoryTransport
from moesaic.parallel.transport import Purpose, Transport

SIZES = (1024, 4096, 16 * 1024, 64 * 1024, 2**20)
GOALS = dict.fromkeys(SIZES[:4], 8.0) | {2**20: 4.0}
TIMEOUT_S = 60.0
LEAST_CALLS = 4
SEND, COLLECT = (Purpose(layer_idx=0, stage=stage) for stage in ("send", "collect"))


def round_trip(wires: Transport, parts: Sequence[torch.Tensor]) -> None:
    """A dispatch and the collect that answers it."""
    for lane, purpose in enumerate((SEND, COLLECT)):
        arrival = wires.exchange(parts, lane=lane, purpose=purpose)
        arrival.wait(TIMEOUT_S)
        arrival.take()


def block_s(wires: Transport, parts: Sequence[torch.Tensor], num_calls: int) -> float:
    """Seconds of one call, of several in a row."""
    began_s = time.perf_counter()
    for _ in range(num_calls):
        round_trip(wires, parts)
    return (time.perf_counter() - began_s) / num_calls


def rank_main(rank: int, num_ranks: int, port: int, num_blocks: int, block_time_s: float, pipe: Any) -> None:
    """One process: its times, by transport and size, of every block."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    mesh = Mesh.join(rank=rank, num_ranks=num_ranks, store=store)
    control = mesh.group("control")
    shape = SegmentShape(num_ranks=num_ranks, lanes=(LaneSize(message_bytes=max(SIZES)),) * 2)
    ends: dict[str, Transport] = {
        "gloo": GlooTransport(mesh, num_lanes=2),
        "shared memory": SharedMemoryTransport(Segment.join(mesh, shape)),
    }
    times: dict[tuple[str, int], list[float]] = {(name, size): [] for name in ends for size in SIZES}
    for size in SIZES:
        parts = [torch.full((size,), rank, dtype=torch.uint8) for _ in range(num_ranks)]
        counts = {}
        for name, wires in ends.items():
            mine = torch.tensor([block_s(wires, parts, LEAST_CALLS)], dtype=torch.float64)
            control.broadcast(mine, 0).wait()  # all make equally many calls
            counts[name] = max(LEAST_CALLS, int(block_time_s / float(mine)))
        for _ in range(num_blocks):
            for name, wires in ends.items():
                control.barrier().wait()
                times[name, size].append(block_s(wires, parts, counts[name]))
    pipe.send(times)
    control.barrier().wait()
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by the benchmark"
    parent.join()
    os._exit(1)


def measure(num_ranks: int, num_blocks: int, block_time_s: float) -> dict[tuple[str, int], list[float]]:
    """Seconds of rank 0's blocks, by transport and bytes a peer."""
    context: Any = multiprocessing.get_context("fork")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    processes = [
        context.Process(
            target=rank_main,
            args=(rank, num_ranks, store.port, num_blocks, block_time_s, pipe[1]),
            daemon=True,
        )
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    found: dict[tuple[str, int], list[float]] = pipes[0][0].recv()
    for process in processes:
        process.join(TIMEOUT_S)
    return found


def main() -> None:
    """Print a table, or JSON for bench/results; exit code 3 where a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=15, help="of calls, for each transport and size")
    parser.add_argument("--block-seconds", type=float, default=0.1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    before = load_average()
    times = measure(args.ranks, args.blocks, args.block_seconds)
    rows: list[list[Any]] = []
    is_met = True
    for size in SIZES:
        spreads = []
        for name in ("gloo", "shared memory"):
            spreads.append(spread([1e6 * seconds for seconds in times[name, size]]))
        ratio = spreads[0]["median"] / spreads[1]["median"]
        is_met &= ratio >= GOALS[size]
        verdict = "met" if ratio >= GOALS[size] else f"short of {GOALS[size]:g}x"
        rows.append([f"{size // 1024} KiB", *spreads, f"{ratio:.1f}", verdict])
    result = describe(
        f"A dispatch and its collect between {args.ranks} processes: gloo and shared memory",
        ["bytes to each peer", "gloo, us", "shared memory, us", "ratio", ""],
        rows,
        [f"One thread a process; load average {before:.1f} before."],
    )
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"load {before:.1f}; medians of {args.blocks} blocks, us of a dispatch and its collect")
        for name, gloo, shared, ratio, verdict in rows:
            print(
                f"{name:>9}  gloo {gloo['median']:8.1f}  shared {shared['median']:8.1f}  {ratio}x  {verdict}"
            )
    sys.exit(0 if is_met else 3)


if __name__ == "__main__":
    main()
