"""Where ranks that others started come in: a port of the controller and a token that they have to know.

What goes through is pickled, so who knows the token may do what the controller may. The token is told in the
store of the rendezvous: whoever reaches that is trusted, as by torch itself.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue

from torch import distributed as dist

from moesaic.engine.launchers.launcher import Address, listen, own_address
from moesaic.errors import MoesaicError, PeerLost
from moesaic.log import get_logger

KEY = "moesaic/door"
_POLL_S = 0.1
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000))
# guess: a cut cable shows in 25 s, whether something was being said (in ms) or not
_log = get_logger("engine")


class Door:
    """The controller's side.

    Owns:    the listening socket, until `close`.
    """

    def __init__(self, address: Address, store: dist.TCPStore) -> None:
        """Listen at the host of `address`; ranks that came in are told to meet in `store`.

        Raises: ConfigError when the address is not this machine's.
        """
        self._listening = listen(Address(host=address.host), "the door for ranks")
        self._listening.settimeout(_POLL_S)
        self._token = secrets.token_bytes(32)
        self._met: SimpleQueue[tuple[int, Connection]] = SimpleQueue()
        host, port = self._listening.getsockname()[:2]
        self._told = json.dumps(
            {"host": host, "port": port, "store_port": store.port, "token": self._token.hex()}
        )

    def publish(self, meeting: dist.Store) -> None:
        """Tell where the door is, in a store that all ranks know."""
        meeting.set(KEY, self._told)

    def let_in(
        self, ranks: Collection[int], timeout_s: float, check: Callable[[], None]
    ) -> dict[int, Connection]:
        """The pipes of these ranks. `check` is called again and again and may raise.

        Raises: PeerLost naming the lowest rank that did not come in time; MoesaicError for two of one number.
        """
        found: dict[int, Connection] = {}
        end_s = time.monotonic() + timeout_s
        while waiting := set(ranks) - set(found):
            if time.monotonic() > end_s:
                raise PeerLost(rank=min(waiting), layer_idx=-1, stage="join", seconds=timeout_s)
            check()
            self._answer()
            while (came := self._next()) is not None:
                rank, pipe = came
                if rank in found or rank not in ranks:
                    raise MoesaicError(
                        f"two processes came as rank {rank}, or there is no such rank: RANK must differ from "
                        f"process to process, 0 to WORLD_SIZE - 1; expected {sorted(ranks)}"
                    )
                found[rank] = pipe
        return found

    def close(self) -> None:
        """Nobody comes in any more."""
        self._listening.close()

    def _answer(self) -> None:
        try:
            came, peer = self._listening.accept()
        except TimeoutError:
            return
        came.setblocking(True)
        # On a thread: who says nothing must not keep the others out.
        threading.Thread(target=self._greet, args=(came, peer), daemon=True).start()

    def _greet(self, came: socket.socket, peer: object) -> None:
        pipe = _pipe_of(came)
        try:
            deliver_challenge(pipe, self._token)
            answer_challenge(pipe, self._token)
            self._met.put((pipe.recv(), pipe))
        except (AuthenticationError, EOFError, OSError) as error:
            _log.warning("%s came to the ranks' door without the token and was sent away: %s", peer, error)
            pipe.close()

    def _next(self) -> tuple[int, Connection] | None:
        try:
            return self._met.get_nowait()
        except Empty:
            return None


def enter(meeting: dist.Store, rank: int, timeout_s: float) -> tuple[Connection, dist.TCPStore, str]:
    """A rank's side: (its pipe, the store in which ranks meet, its own address on the way there).

    Raises: MoesaicError when no controller told its door in time, or cannot be reached.
    """
    end_s = time.monotonic() + timeout_s
    while not meeting.check([KEY]):
        if time.monotonic() > end_s:
            raise MoesaicError(
                f"rank {rank}: no controller within {timeout_s:g} s; it is in the process of rank 0, which "
                "must be started too"
            )
        time.sleep(_POLL_S)
    told = json.loads(meeting.get(KEY))
    host, token = told["host"], bytes.fromhex(told["token"])
    try:
        pipe = _pipe_of(socket.create_connection((host, told["port"]), timeout=timeout_s))
        answer_challenge(pipe, token)
        deliver_challenge(pipe, token)
        pipe.send(rank)
        store = dist.TCPStore(host, told["store_port"], is_master=False, timeout=timedelta(seconds=timeout_s))
    except (AuthenticationError, EOFError, OSError, RuntimeError) as error:
        raise MoesaicError(
            f"rank {rank}: the controller at {host} port {told['port']} cannot be reached ({error}); name an "
            "address of its machine that this one reaches with --rank-address HOST:PORT"
        ) from error
    return pipe, store, own_address(host, told["store_port"])


def _pipe_of(connected: socket.socket) -> Connection:
    """As a pipe that notices when the other machine is gone."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(connected.detach())
