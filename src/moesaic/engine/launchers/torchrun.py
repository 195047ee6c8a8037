r"""Ranks that torchrun started, or whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

The controller is no rank: it lives in the process of rank 0, which starts rank 0 as a child. The processes of
the other ranks come to its door.

    node 0                                  node 1
    process 0: controller, server           process 2: rank 2 ---.
       |   \---- child: rank 0              process 3: rank 3 --. |
       |<--- process 1: rank 1                                  | |
       '<-------------------------------------------------------'-'
"""

from __future__ import annotations

from datetime import timedelta

from torch import distributed as dist

from moesaic.engine.config import EngineConfig, World
from moesaic.engine.launchers.door import Door, enter
from moesaic.engine.launchers.launcher import (
    JOIN_TIMEOUT_S,
    Address,
    Launcher,
    Member,
    open_store,
)
from moesaic.engine.launchers.local import end_process, ignore_signals, start_process
from moesaic.errors import ConfigError, PeerLost


class Torchrun(Launcher):
    """The controller's side, in the process of rank 0."""

    name = "torchrun"

    def __init__(
        self, world: World, address: Address | None = None, *, timeout_s: float = JOIN_TIMEOUT_S
    ) -> None:
        """Raises: ConfigError when a port is taken, or the rendezvous cannot be reached."""
        self._world, self._timeout_s = world, timeout_s
        address = address or Address(host=world.master_host)
        self._store = open_store(address)
        self._door = Door(address, self._store)
        self._own: Member | None = None
        self._meeting = _meet(world, timeout_s)

    def start(self, num_ranks: int) -> list[Member]:
        """Start rank 0 and let the others in."""
        own = self._own = start_process(0, self._store)
        self._door.publish(self._meeting)
        pipes = self._door.let_in(range(1, num_ranks), self._timeout_s, self._check)
        return [own, *(Member(pipe=pipes[rank], process=None) for rank in range(1, num_ranks))]

    def close(self) -> None:
        """End rank 0; the processes of the others are torchrun's, and end when their pipes close."""
        self._door.close()
        if self._own is not None:
            self._own.pipe.close()
            end_process(self._own)

    def _check(self) -> None:
        if self._own is not None and self._own.process is not None and self._own.process.poll() is not None:
            raise PeerLost(rank=0, layer_idx=-1, stage="join", seconds=0.0)


def serve_as_rank(config: EngineConfig, world: World, *, timeout_s: float = JOIN_TIMEOUT_S) -> None:
    """The life of a rank other than 0; returns when its controller has let it go.

    `config` is what this process was asked for: it must come to the same as the controller's.

    Raises: MoesaicError when the controller does not come.
    """
    pipe, store, address = enter(_meet(world, timeout_s), world.rank, timeout_s)
    ignore_signals()
    from moesaic.engine.rank import serve  # heavy: after the controller was found

    serve(pipe, store, world.rank, address, own=config, started=world.started())


def _meet(world: World, timeout_s: float) -> dist.Store:
    """The store that all processes know from the start.

    Raises: ConfigError when it cannot be opened, or reached.
    """
    is_ours = world.rank == 0 and not world.has_store
    host, port = world.master_host, world.master_port
    if is_ours:
        store = open_store(Address(host=host, port=port))
    else:
        try:
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise ConfigError(
                f"rank {world.rank}: MASTER_ADDR {host} MASTER_PORT {port} cannot be reached within "
                f"{timeout_s:g} s; start rank 0 there, and let this machine reach it"
            ) from error
    return dist.PrefixStore(f"moesaic attempt {world.attempt}", store)
