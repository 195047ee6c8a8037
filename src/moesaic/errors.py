"""Every error a caller can act on, in one tree. Messages name the thing, the value, the rule, the next step.

MoesaicError
  ConfigError(ValueError)        the caller asked for something inconsistent
    UnsupportedModelError        the architecture, the missing feature, the known ones
    RequestError                 one request is wrong; the server answers 4xx and lives on
  CheckpointError                the file, the key, both shapes
  CapacityError                  does not fit: need, have, where
    KvExhausted   HostMemoryShort   Overloaded
  SwapRunning                    another expert plan is on its way; ask again when it is in force
  KernelUnavailable              op, backend, what is missing, what to do
  PeerLost                       rank, layer_idx, stage, seconds
    CollectiveTimeout
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial


class MoesaicError(Exception):
    """Root of all expected errors: the CLI prints it in one line, the server as an error body."""

    exit_code = 2
    is_retriable = False


class ConfigError(MoesaicError, ValueError):
    """The caller asked for something inconsistent or unknown."""


class UnsupportedModelError(ConfigError):
    """The model needs a feature that this build does not run."""


class RequestError(ConfigError):
    """One request is wrong. `param` is the field to blame, as the OpenAI error body wants it."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class CheckpointError(MoesaicError):
    """A file of the checkpoint is missing, damaged, or disagrees with the config."""


class CapacityError(MoesaicError):
    """Something does not fit: the message says what it needs, what there is, and where."""


class KvExhausted(CapacityError):
    """One request alone needs more KV blocks than the pool has."""


class HostMemoryShort(CapacityError):
    """The weights or the KV pool do not fit in this machine's memory."""


class Overloaded(CapacityError):
    """The queue is full; the same request may be sent again after `retry_after_s` seconds."""

    is_retriable = True

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SwapRunning(MoesaicError):
    """An expert plan was asked for while another one is on its way."""

    is_retriable = True


class KernelUnavailable(MoesaicError):
    """An op cannot run on the backend asked for; nothing else was run in its place."""


class KernelTimeout(MoesaicError):
    """A native call did not end in time; its ops take no further calls."""


class PeerLost(MoesaicError):
    """A rank stopped answering; after 0 seconds: its process has ended.

    `stage` is send, experts, collect, sum or move; outside layers join, start, step or move.
    """

    is_retriable = True

    def __init__(self, *, rank: int, layer_idx: int, stage: str, seconds: float) -> None:
        what = "has ended" if seconds == 0.0 else f"did not answer within {seconds:.1f} s"
        super().__init__(
            f"rank {rank} {what} ({f'layer {layer_idx}, ' if layer_idx >= 0 else ''}stage {stage}); "
            + ("start all ranks again" if stage in ("join", "start") else "its requests can be sent again")
        )
        self.rank, self.layer_idx, self.stage, self.seconds = rank, layer_idx, stage, seconds

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles: a rank tells the controller whom it lost."""
        named = {name: getattr(self, name) for name in ("rank", "layer_idx", "stage", "seconds")}
        return partial(type(self), **named), ()


class CollectiveTimeout(PeerLost):
    """A collective did not finish in time; the rank named is the one that was waited for."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause for an error message: the nearest known names, or all of them when few.

    >>> nearest("max_token", ["max_tokens", "seed"])
    'did you mean max_tokens?'
    """
    names = sorted(known)
    close = get_close_matches(name, names, n=2, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    if len(names) <= 12:
        return f"known: {', '.join(names)}"
    return f"known: {', '.join(names[:12])} and {len(names) - 12} more"
