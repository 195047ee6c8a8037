"""What every launcher gives: a pipe to each rank, and the store in which the ranks meet. Knows no model."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from torch import distributed as dist

from moesaic.errors import ConfigError

JOIN_TIMEOUT_S = 120.0  # guess: the slowest rank has imported torch by then
END_S = 5.0  # guess: what a rank may still do after its controller left


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Member:
    """One rank as its controller reaches it."""

    pipe: Connection
    process: subprocess.Popen[bytes] | None  # None: the child of another


class Launcher(Protocol):
    """Starts ranks, or waits for those that something else starts.

    Owns:    the processes that it started and the store, until `close`.
    """

    name: str

    def start(self, num_ranks: int) -> list[Member]:
        """All ranks, by rank, each connected.

        Raises: PeerLost naming a rank that did not come in time; ConfigError with a next step.
        """
        ...

    def close(self) -> None:
        """Let no process live on that was started here; the pipes are closed before."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """A place to listen at; port 0 takes a free one."""

    host: str
    port: int = 0

    @classmethod
    def parse(cls, text: str, what: str) -> Address:
        """From `HOST:PORT`; `what` has the address, in messages.

        Raises: ConfigError naming what is wrong with it.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65535:
            why = (
                "no port" if not colon else "no host" if not host else f"no port from 0 to 65535 but {port!r}"
            )
            raise ConfigError(f"{what} {text!r} has {why}: it is HOST:PORT, as in 10.0.0.1:29400")
        return cls(host=host.removeprefix("[").removesuffix("]"), port=int(port))


def listen(address: Address, what: str) -> socket.socket:
    """A listening socket at this address alone.

    Owns:    the socket is the caller's to close.
    Raises:  ConfigError when the name is not known, the address is not this machine's, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address.host, address.port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be at {address.host} port {address.port}: {_why_not(address, error)}"
        ) from error


def _why_not(address: Address, error: OSError) -> str:
    """What is wrong with an address to listen at, and what to do."""
    other = "name an address of this machine with --rank-address HOST:PORT (port 0: a free one)"
    if isinstance(error, socket.gaierror):
        return f"the name {address.host} is not known here ({error.strerror}); {other}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{address.host} is no address of this machine; {other}"
    why = os.strerror(error.errno) if error.errno else error  # create_server adds the address to its own
    return f"{why}; free the port, or {other}"


def open_store(address: Address) -> dist.TCPStore:
    """The store in which ranks meet; it lives in the controller, so any rank may die."""
    listening = listen(address, "the ranks' store")
    host, port = listening.getsockname()[:2]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def own_address(host: str, port: int) -> str:
    """The address of this machine from which it reaches another. Sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        name: str = probe.getsockname()[0]
    return name
