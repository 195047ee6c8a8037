"""`moesaic fit`: whether a model fits a machine, and how fast it is there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.units import format_bytes, format_count

if TYPE_CHECKING:  # the planner's modules are heavy: each function imports what it needs, --help nothing
    from moesaic.planner.fit import Fit
    from moesaic.spec.model import ModelSpec


def fit_command(
    model: Annotated[
        str,
        typer.Argument(help="A model folder, a config.json, a GGUF file, or a preset such as deepseek-v3."),
    ],
    machine: Annotated[str, typer.Option("--machine", help="Device x per node x nodes, as in h200x8x4.")],
    hardware: Annotated[
        Path | None,
        typer.Option("--hardware", help="A machine file (TOML) of your own, or a folder of them."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Sequences at a time.")] = 1,
    context: Annotated[
        int | None,
        typer.Option("--context", help="Tokens of each sequence [default: 4096, or all that the model has]."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="Weight format [default: as the checkpoint stores them].")
    ] = None,
    kv_bits: Annotated[float, typer.Option("--kv-bits", help="Bits of a number in the KV cache.")] = 16.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether a model fits, with experts in host memory or on disk if need be, and what is missing."""
    from moesaic.planner.fit import fit
    from moesaic.planner.question import undeclared_format
    from moesaic.spec.hardware import cluster

    name, spec, notes = _read(model)
    found = fit(
        spec, name, cluster(machine, hardware), batch=batch, context=context,
        weight_format=weights,
        kv_bits=kv_bits,
    )  # fmt: skip
    undeclared = undeclared_format(model, spec) if weights is None else None
    found = replace(found, notes=(*notes, *filter(None, [undeclared]), *found.notes))
    typer.echo(json.dumps(found.to_json(), indent=2, allow_nan=False) if as_json else render(found))


def _read(model: str) -> tuple[str, ModelSpec, tuple[str, ...]]:
    """What messages call the model, its sizes, and what its file lacks."""
    from moesaic.interop.gguf import is_gguf, read_gguf
    from moesaic.interop.gguf_config import read_spec
    from moesaic.spec.families import read_config
    from moesaic.spec.locate import locate

    path = Path(model).expanduser()
    if model and is_gguf(path):
        file = read_gguf(path)
        absent = tuple(
            f"{name} is missing: its tensors are taken to be as the others" for name in file.missing
        )
        return str(path), read_spec(file), (*absent, *file.cut)
    located = locate(model)
    return located.name, read_config(located.config, name=located.name), ()


def render(found: Fit) -> str:
    """The answer as text."""
    lines = [
        f"{found.model} on {found.machine}, {found.batch} sequences of {found.context} tokens",
        f"  parameters  {format_count(found.num_params)} to hold, "
        f"{format_count(found.active_params)} to compute a token",
    ]
    speed = found.tokens_per_s
    verdict = {
        "fits": "fits", "fits_offloaded": "fits with experts outside the devices",
        "does_not_fit": f"does not fit: {format_bytes(found.missing_bytes)} are missing",
    }[found.verdict]  # fmt: skip
    if speed is not None:
        verdict += f", {speed.value:.3g} tokens/s ({speed.low:.3g} to {speed.high:.3g})"
    lines.append(f"  verdict     {verdict}")
    for tier, need in found.need_bytes.items():
        share = found.expert_share[tier]
        experts = f", {share:.0%} of the routed experts" if share else ""
        lines.append(f"  {tier:<10}  {format_bytes(need)} of {format_bytes(found.have_bytes[tier])}{experts}")
    axes = ", ".join(f"{name} {size}" for name, size in found.layout.items())
    lines.append(f"  layout      {axes}")
    held = ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in found.rank_bytes.items() if size
    )
    lines.append(f"  one rank    {held}; it has {format_bytes(found.rank_have_bytes)}")
    lines += [f"  note        {note}" for note in found.notes]
    return "\n".join(lines)
