"""Runs the application: takes the port, serves, and on SIGTERM or SIGINT lets running requests finish."""

from __future__ import annotations

import signal
import socket
import threading
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from moesaic.errors import ConfigError
from moesaic.log import get_logger
from moesaic.server.problem import EngineLost
from moesaic.server.settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from moesaic.engine.client import EngineClient

_log = get_logger("server")
_FLUSH_S = 5  # for answers that are complete but not yet sent, at shutdown
_BACKLOG = 2048
_TICKS_PER_CHECK = 10  # of uvicorn's, ten a second


def bind(host: str, port: int) -> socket.socket:
    """A socket that owns the address; nobody is heard before `listen`. Port 0 takes a free one.

    Owns:    the socket is the caller's to close.
    Raises:  ConfigError when the address is taken, or is not this machine's.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be 0 to 65535, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror or error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; change --host or --port"
        ) from error
    return sock


def listen(sock: socket.socket) -> None:
    """Let clients in; they wait until the server runs.

    Raises: ConfigError when another process began to listen on the same address since `bind`.
    """
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {url_of(sock)}: {error.strerror or error}") from error


def url_of(sock: socket.socket) -> str:
    """`http://127.0.0.1:8000`, as a client on this machine writes it."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class DrainingServer(uvicorn.Server):
    """Uvicorn whose first signal drains the engine while the port stays open; the second ends it at once."""

    def __init__(
        self, config: uvicorn.Config, app: FastAPI, engine: EngineClient, *, drain_timeout_s: float
    ) -> None:
        super().__init__(config)
        self._app = app
        self._engine = engine
        self._drain_timeout_s = drain_timeout_s
        self._drainer: threading.Thread | None = None
        self.has_lost_engine = False

    async def on_tick(self, counter: int) -> bool:
        """Whether to end: also when the engine has, without having been asked to."""
        if counter % _TICKS_PER_CHECK == 0 and not self._app.state.api.is_draining:
            self.has_lost_engine = not self._engine.snapshot().is_ready
            self.should_exit = self.should_exit or self.has_lost_engine
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Answer a signal; runs on the main thread, between two instructions."""
        if self._drainer is None:
            self._drainer = threading.Thread(
                target=self._drain, args=(sig,), name="moesaic-drain", daemon=True
            )
            self._drainer.start()
        else:
            self.force_exit = self.should_exit = True

    def _drain(self, sig: int) -> None:
        self._app.state.api.is_draining = True
        num_left = self._engine.snapshot().num_running
        running = "1 request runs" if num_left == 1 else f"{num_left} requests run"
        _log.info("%s: draining, %s", signal.Signals(sig).name, running)
        if self._engine.drain(self._drain_timeout_s):
            _log.info("drained")
        else:
            _log.warning("requests were left after %g s: they end with an error", self._drain_timeout_s)
            self._engine.close()
        self.should_exit = True


def run(app: FastAPI, engine: EngineClient, sock: socket.socket, settings: ServerSettings) -> None:
    """Serve until a signal; blocks. Call on the main thread, where signals arrive.

    Raises: EngineLost when the engine failed; clients were told first.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_FLUSH_S,
    )
    server = DrainingServer(config, app, engine, drain_timeout_s=settings.drain_timeout_s)
    server.run(sockets=[sock])
    if server.has_lost_engine:
        raise EngineLost("the engine has ended, as the log says: start the server again")
