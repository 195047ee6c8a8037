"""Processes as ranks: forked from the test, so that torch is there already; none outlives the test."""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import multiprocessing
import os
import socket
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from moesaic.engine.config import EngineConfig
from moesaic.engine.launchers.launcher import Launcher, Member, open_store
from moesaic.engine.launchers.local import LOOPBACK
from moesaic.engine.rank import serve
from moesaic.parallel import segment
from moesaic.parallel.mesh import Mesh

TIMEOUT_S = 60.0


def segments_left() -> list[Path]:
    """Names of shared memory that this process left behind, or one that has ended.

    Runs beside this one hold locks on theirs.
    """
    return [
        path
        for path in segment.FOLDER.glob(f"{segment.PREFIX}*")
        if path.name.endswith(f"-{os.getpid()}") or not _is_locked(path)
    ]


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:  # its run has started meanwhile
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def run_ranks(num_ranks: int, target: Callable[[Mesh], Any], *, dying: tuple[int, ...] = ()) -> list[Any]:
    """What `target` returns on each rank, or the exception it raises; None of `dying` ranks."""
    context: Any = multiprocessing.get_context("fork")
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S)
    )
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    all_forked = context.Event()
    processes = [
        context.Process(
            target=_run, args=(rank, num_ranks, store.port, target, pipe[1], all_forked), daemon=True
        )
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    all_forked.set()
    results = []
    try:
        for rank, (receiver, _) in enumerate(pipes):
            if rank in dying:
                results.append(None)
                continue
            assert receiver.poll(TIMEOUT_S), f"rank {rank} said nothing"
            results.append(receiver.recv())
        for process in processes:
            process.join(TIMEOUT_S)
            assert process.exitcode is not None, "a rank lives on"
    finally:
        for process in processes:
            process.kill()
    return results


def _settle_in(all_forked: Any) -> None:
    """A fork ends with its parent, and has none of its threads.

    So stores of the parent, which wait for theirs, must not be taken apart here; and a torch operation over
    several threads would never end. A lock that such a thread holds at a fork is never let go in it: nobody
    speaks to the store, which has one, before all are forked. One that hangs says where.
    """
    faulthandler.dump_traceback_later(TIMEOUT_S / 2)
    all_forked.wait()
    gc.freeze()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    torch.set_num_threads = lambda num_threads: None  # type: ignore[assignment]


def _run(
    rank: int, num_ranks: int, port: int, target: Callable[[Mesh], Any], pipe: Any, all_forked: Any
) -> None:
    _settle_in(all_forked)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    mesh = Mesh.join(rank=rank, num_ranks=num_ranks, store=store, timeout_s=TIMEOUT_S)
    try:
        pipe.send(target(mesh))
    except Exception as error:  # noqa: BLE001 - handed to the test, which knows what it expects
        traceback.print_exc()
        pipe.send(error)
    os._exit(0)  # no destructors of a forked interpreter


class Forked(Launcher):
    """Ranks of an engine as forks of the test. `ask` runs in each and says what that process was asked for;
    None: nothing of its own."""

    name = "forked"

    def __init__(self, ask: Callable[[int], EngineConfig | None]) -> None:
        self._ask = ask
        self._store = open_store(LOOPBACK)
        self._processes: list[Any] = []

    def start(self, num_ranks: int) -> list[Member]:
        context: Any = multiprocessing.get_context("fork")
        all_forked = context.Event()
        members = []
        for rank in range(num_ranks):
            ours, theirs = socket.socketpair()
            with theirs:
                told = (rank, theirs, self._store.port, self._ask, all_forked)
                process = context.Process(target=_serve, args=told, daemon=True)
                process.start()
            self._processes.append(process)
            members.append(Member(pipe=Connection(ours.detach()), process=None))
        all_forked.set()
        return members

    def close(self) -> None:
        for process in self._processes:
            process.join(TIMEOUT_S)
            assert process.exitcode is not None, "a rank lives on"


def _serve(
    rank: int, theirs: socket.socket, port: int, ask: Callable[[int], EngineConfig | None], all_forked: Any
) -> None:
    _settle_in(all_forked)
    pipe, store = Connection(theirs.detach()), dist.TCPStore("127.0.0.1", port, is_master=False)
    serve(pipe, store, rank, "127.0.0.1", own=ask(rank))
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are started by the test"
    parent.join()
    os._exit(1)
