"""Ranks as children of the controller, on its machine, each with a socket pair that no other can open."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection

from torch import distributed as dist

from moesaic.engine.launchers.launcher import END_S, Address, Launcher, Member, open_store, own_address

LOOPBACK = Address(host="127.0.0.1")


class Local(Launcher):
    """Processes of this machine."""

    name = "local"

    def __init__(self, address: Address | None = None) -> None:
        """Raises: ConfigError when the store cannot be at `address`."""
        self._store = open_store(address or LOOPBACK)
        self._members: list[Member] = []

    def start(self, num_ranks: int) -> list[Member]:
        """Returns at once; a child that ends closes its pipe."""
        self._members = [start_process(rank, self._store) for rank in range(num_ranks)]
        return self._members

    def close(self) -> None:
        """Ranks leave when their pipe closes, and are killed when they do not."""
        for member in self._members:
            end_process(member)


def start_process(rank: int, store: dist.TCPStore) -> Member:
    """A child that will be this rank."""
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = [str(rank), str(theirs.fileno()), store.host, str(store.port)]
        code = "from moesaic.engine.launchers.local import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
        )
    return Member(pipe=Connection(ours.detach()), process=process)


def end_process(member: Member) -> None:
    """Wait a while, then kill."""
    if member.process is None:
        return
    try:
        member.process.wait(END_S)
    except subprocess.TimeoutExpired:
        member.process.kill()
        member.process.wait()


def ignore_signals() -> None:
    """A rank ends with its controller, which has requests to finish; both may get the same signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main() -> None:
    """With the arguments RANK FD HOST PORT; the pipe's other end is the controller's."""
    rank, descriptor, host, port = sys.argv[1:]
    ignore_signals()
    from moesaic.engine.rank import serve  # heavy: after the signals are dealt with

    pipe = Connection(socket.socket(fileno=int(descriptor)).detach())
    store = dist.TCPStore(host, int(port), is_master=False)
    serve(pipe, store, int(rank), own_address(host, int(port)))
    os._exit(0)  # taking an interpreter with torch apart takes seconds, and the controller waits
