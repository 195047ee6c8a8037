"""What surrounds every request: its id, its line in the log, the key, the gate. Plain ASGI: no buffering."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moesaic.errors import Overloaded
from moesaic.log import get_logger
from moesaic.obs.metrics import Metrics
from moesaic.server.problem import Problem, problem_of, unavailable

_log = get_logger("server")
GENERATION_PATHS = frozenset(["/v1/completions", "/v1/chat/completions"])
OPEN_PATHS = frozenset(["/health", "/ready"])  # probes carry no key and learn one word
PROBE_PATHS = OPEN_PATHS | {"/metrics"}  # asked every few seconds: their lines are for debugging
CONCURRENT_RETRY_S = 1.0


class Journal:
    """Names each request, counts it, and writes one line when it ends. Contents are never written."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; `scope["moesaic"]` collects what the line says."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        notes: dict[str, Any] = {"request_id": secrets.token_hex(12), "arrival_s": started_s}
        scope["moesaic"] = notes
        status: int | None = None

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = str(notes["request_id"])
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception as error:
            _log.exception("request %s failed", notes["request_id"])
            if status is not None:
                raise  # half an answer was sent: the connection must not end as if it were whole
            await send_problem(send_named, problem_of(error))
        finally:
            status = notes.pop("status", status)
            del notes["arrival_s"]
            route = self._route_of(scope)
            self._metrics.add("moesaic_http_requests_total", route, str(status))
            notes |= {"method": scope["method"], "route": route, "status": status}
            notes["seconds"] = round(time.monotonic() - started_s, 4)
            level = logging.DEBUG if scope["path"] in PROBE_PATHS else logging.INFO
            _log.log(level, "%s", _line(notes), extra=notes)

    def _route_of(self, scope: Scope) -> str:
        """The pattern of the path, also where the request was answered before any route saw it."""
        matched = (route for route in self._routes if route.matches(scope)[0] is not Match.NONE)
        return getattr(scope.get("route") or next(matched, None), "path", "unmatched")


class Gate:
    """Lets requests in: the right key, room for another generation, a server that is not shutting down."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        max_concurrent: int,
        is_draining: Callable[[], bool],
        metrics: Metrics,
    ) -> None:
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()
        self._max_concurrent = max_concurrent
        self._is_draining = is_draining
        self._metrics = metrics
        self._num_running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = self._refusal(scope)
        if problem is not None:
            await send_problem(send, problem)
            return
        if scope["path"] not in GENERATION_PATHS:
            await self._app(scope, receive, send)
            return
        self._count(1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._count(-1)

    def _refusal(self, scope: Scope) -> Problem | None:
        path = scope["path"]
        if self._expected is not None and path not in OPEN_PATHS:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                return Problem(
                    status=401,
                    message="the API key is missing or wrong: send the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        if path not in GENERATION_PATHS:
            return None
        if self._is_draining():
            return unavailable("the server is shutting down; send the request again, elsewhere")
        if self._num_running >= self._max_concurrent:
            message = f"{self._num_running} requests are being answered, the limit; send it again later"
            return problem_of(Overloaded(message, retry_after_s=CONCURRENT_RETRY_S))
        return None

    def _count(self, change: int) -> None:
        self._num_running += change
        self._metrics.add("moesaic_http_requests_in_flight", value=change)


async def send_problem(send: Send, problem: Problem) -> None:
    """Answer with an error, outside of any route."""
    body = json.dumps(problem.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in problem.headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _line(notes: dict[str, object]) -> str:
    """`POST /v1/completions 200 0.532 s prompt=5 cached=0 output=16 finish=length`."""
    names = {
        "prompt_tokens": "prompt",
        "cached_tokens": "cached",
        "output_tokens": "output",
        "finish": "finish",
    }
    tail = "".join(f" {short}={notes[name]}" for name, short in names.items() if name in notes)
    return f"{notes['method']} {notes['route']} {notes['status']} {notes['seconds']} s{tail}"
