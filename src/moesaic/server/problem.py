"""Errors as HTTP: a status, headers, and the body that OpenAI's clients read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moesaic.errors import (
    CapacityError,
    ConfigError,
    KvExhausted,
    MoesaicError,
    Overloaded,
    PeerLost,
    RequestError,
)

DRAIN_RETRY_S = 5.0  # guess: how soon another server answers in place of one that drains


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An answer that is an error."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class HttpError(MoesaicError):
    """An error that only exists over HTTP, such as a wrong path or key."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class ClientLeftError(MoesaicError):
    """The client closed the connection before its answer began; nobody reads this."""


class GenerationError(MoesaicError):
    """The engine gave up on a request that it had accepted."""


class EngineLost(GenerationError):
    """It did so because the engine, or a part of it, was lost: another one may answer."""

    is_retriable = True


def problem_of(error: Exception, *, is_draining: bool = False) -> Problem:
    """How an error is answered. Unexpected ones say nothing of the inside; the log does."""
    match error:
        case HttpError():
            return error.problem
        case ClientLeftError():
            return Problem(status=499, message="the client left")
        case RequestError():
            return Problem(status=400, message=str(error), param=error.param, code=error.code)
        case Overloaded() if is_draining:
            return unavailable("the server is shutting down; send the request again, elsewhere")
        case Overloaded():
            return Problem(
                status=429,
                message=str(error),
                kind="rate_limit_error",
                code="overloaded",
                headers={"Retry-After": str(max(1, math.ceil(error.retry_after_s)))},
            )
        case KvExhausted():
            return Problem(status=400, message=str(error), code="context_length_exceeded")
        case EngineLost() | PeerLost():
            return unavailable(str(error))
        case GenerationError():
            return Problem(status=500, message=str(error), kind="server_error", code="generation_failed")
        case CapacityError():
            return Problem(status=503, message=str(error), kind="server_error", code="capacity")
        case ConfigError():
            return Problem(status=400, message=str(error))
        case MoesaicError():
            return Problem(status=500, message=str(error), kind="server_error")
        case _:
            message = "internal error; the server's log has it under this answer's x-request-id"
            return Problem(status=500, message=message, kind="server_error")


def unavailable(message: str) -> Problem:
    """503 with the time to wait."""
    return Problem(
        status=503,
        message=message,
        kind="server_error",
        code="unavailable",
        headers={"Retry-After": str(math.ceil(DRAIN_RETRY_S))},
    )
