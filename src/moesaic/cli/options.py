"""Options that several verbs take, written once."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer

from moesaic.engine.config import EngineConfig

Model = Annotated[str, typer.Argument(help="A model folder, a cached ORG/NAME, or demo.")]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Requests computed in one step.")]
KvBytes = Annotated[
    str | None, typer.Option(help="Size of the KV pool, as in 512MiB [default: from free memory].")
]
DtypeName = Annotated[str | None, typer.Option(help="float32 or bfloat16 [default: the checkpoint's].")]
NumericsName = Annotated[str, typer.Option(help="Numerics preset: portable or fast.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads to compute with [default: all processors].")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end token.")]


def defaults_of(kind: type[Any]) -> dict[str, Any]:
    """The defaults that a dataclass states, so that no verb states them again."""
    return {field.name: field.default for field in fields(kind)}


ENGINE_DEFAULTS = defaults_of(EngineConfig)
