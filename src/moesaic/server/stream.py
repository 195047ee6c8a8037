"""Server-sent events: a response whose chunks are answered one by one, and that ends with the client."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moesaic.errors import MoesaicError
from moesaic.log import get_logger
from moesaic.server.choice import Delta
from moesaic.server.generation import until_gone
from moesaic.server.problem import ClientLeftError, problem_of
from moesaic.server.reply import ReplyMaker

_log = get_logger("server")
DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """The deltas of one job as `data:` lines.

    An error after the first chunk becomes an event with the error's body; no `[DONE]` follows it.

    Owns:    the deltas, which are closed however the response ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Delta,
        deltas: AsyncGenerator[Delta, None],
        replies: ReplyMaker,
        *,
        has_usage: bool,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._first, self._deltas, self._replies, self._has_usage = first, deltas, replies, has_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream, or as much as the client stays for."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await until_gone(receive, self._send_all(send))
        except ClientLeftError:
            scope["moesaic"]["status"] = 499
        finally:
            await self._deltas.aclose()
            scope["moesaic"].update(self._replies.notes())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        try:
            await _send(send, event(self._replies.chunk(self._first)))
            async for delta in self._deltas:
                await _send(send, event(self._replies.chunk(delta)))
            if self._has_usage:
                await _send(send, event(self._replies.usage_chunk()))
            await _send(send, DONE)
        except MoesaicError as error:
            _log.error("a stream ends early: %s", error)
            await _send(send, error_event(error))
        except Exception as error:  # noqa: BLE001 - the client is told before the connection ends
            _log.exception("a stream failed")
            await _send(send, error_event(error))


def event(chunk: BaseModel) -> bytes:
    """One chunk; fields that say nothing are left out."""
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


def error_event(error: Exception) -> bytes:
    """The body of an error as an event."""
    return b"data: " + json.dumps(problem_of(error).body()).encode() + b"\n\n"


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
