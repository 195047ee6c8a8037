"""`moesaic verify`: does this engine compute what transformers computes, however requests are batched?"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.audit.prompts import HEAVY_TOKENS, NUM_TOKENS
from moesaic.audit.verify import Pass, Verification, dump_json, verify
from moesaic.cli.options import CHECK_FAILED, DispatchFormatName, FormatName, KvFormatName, MatmulShards
from moesaic.cli.verify_layouts import verify_layouts_command
from moesaic.engine.config import EngineConfig, read_environment, read_hub_cache
from moesaic.errors import ConfigError
from moesaic.spec.locate import Located, locate
from moesaic.units import format_bytes

SHOWN = 5  # tensors named on the screen; --json has all


class LayoutSet(StrEnum):
    """Which layouts `--layouts` compares."""

    ALL = "all"
    LONG = "long"


def verify_command(
    model: Annotated[str, typer.Argument(help="A model folder, a cached ORG/NAME, or demo.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16 [default: float32 if memory holds it, and the checkpoint's]."),
    ] = None,
    weight_format: FormatName = None,
    kv_format: KvFormatName = None,
    dispatch_format: DispatchFormatName = None,
    matmul_shards: MatmulShards = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads to compute with [default: all].")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts, one a line [default: a built-in set].")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Greedy tokens after each prompt [default: {NUM_TOKENS}; {HEAVY_TOKENS} if heavy]."
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Folder that transformers runs, such as the original of a conversion [default: the same]."
        ),
    ] = None,
    layouts: Annotated[
        LayoutSet | None,
        typer.Option(
            help="Compare layouts of 1 to 4 ranks with one rank instead: all, where every two choices meet; "
            "long, every combination."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a model against transformers, alone and in batches, or its layouts against one rank."""
    if find_spec("torch") is None:  # else a child process would say so, in its own words
        raise ModuleNotFoundError("verify runs the model", name="torch")
    hub, environment = read_hub_cache(), read_environment()
    located = locate(model, hub=hub, needs_weights=True)
    wishes = EngineConfig(
        model=str(located.weights_folder()),
        dtype=dtype,  # type: ignore[arg-type]  # checked by the dataclass
        format=weight_format,  # type: ignore[arg-type]  # checked by the dataclass
        kv_format=kv_format,  # type: ignore[arg-type]  # checked by the dataclass
        dispatch_format=dispatch_format,  # type: ignore[arg-type]  # checked by the dataclass
        matmul_shards=matmul_shards,
        num_threads=threads or environment.num_threads,
        backend=environment.backend,
    )
    show = _show_since(time.monotonic())
    if layouts is not None:
        unused = {"--prompts": prompts, "--tokens": tokens, "--reference": reference}
        given = [name for name, value in unused.items() if value is not None]
        if given:
            raise ConfigError(f"--layouts compares this engine with itself, so leave out {', '.join(given)}")
        verify_layouts_command(
            wishes, located.name, is_long=layouts is LayoutSet.LONG, as_json=as_json, show=show
        )
        return
    found = verify(
        located,
        wishes,
        reference=None if reference is None else _locate_reference(reference, hub),
        prompts=prompts,
        num_tokens=tokens,
        show=show,
    )
    typer.echo(dump_json(found) if as_json else render(found))
    if found.failures:
        raise typer.Exit(CHECK_FAILED)


def _locate_reference(reference: str, hub: Path | None) -> Located:
    try:
        return locate(reference, hub=hub, needs_weights=True)
    except ConfigError as error:
        raise ConfigError(f"--reference: {error}") from error


def _show_since(began_s: float) -> Callable[[str], None]:
    """Prints what is being done, and after how many seconds."""

    def show(phase: str) -> None:
        print(f"[{time.monotonic() - began_s:5.0f} s] {phase}", file=sys.stderr, flush=True)

    return show


def render(found: Verification) -> str:
    """The verification as text."""
    against = f"transformers {found.oracle}" if found.oracle else "nothing"
    prompts = f"{found.num_prompts} prompts of {found.num_prompt_tokens} tokens"
    work = f"{prompts}, {found.num_tokens} greedy tokens each" if found.passes else "nothing was run"
    lines = [f"{found.model} ({found.model_type}) against {against}: {work}"]
    if found.reference is not None:
        lines.append(_row("reference", found.reference))
    if found.oracle_missing:
        lines.append(_row("no oracle", found.oracle_missing))
    for one in found.passes:
        lines += _pass_rows(one)
    lines += _tensor_rows(found)
    lines += [_row("note", note) for note in found.notes]
    lines += [_row("FAILED", failure) for failure in found.failures]
    if not found.failures:
        lines.append(
            _row("ok", "every check passed" + ("" if found.oracle else " that needs no transformers"))
        )
    return "\n".join(lines)


def _row(label: str, text: str) -> str:
    return f"  {label:<12}{text}"


def _pass_rows(one: Pass) -> list[str]:
    rows = []
    if one.stages:
        layers = [stage for stage in one.stages if stage.name.startswith("layer")]
        worst = max(layers, key=lambda stage: stage.median)
        own = (
            "" if worst.oracle_median is None else f" (transformers' own rounding: {worst.oracle_median:.2g})"
        )
        rows.append(
            _row(
                one.dtype,
                f"logits differ by at most {one.max_abs_logit_diff:.3g}; greedy tokens agree "
                f"{one.greedy_agreement:.1%}; layers by {worst.median:.2g} in the median at most{own}, "
                f"{sum(stage.num_far for stage in one.stages)} far rows",
            )
        )
        if one.first_difference is not None:
            rows.append(_row("", f"first difference: {one.first_difference}"))
    cells = ", ".join(_cell(cell) for cell in one.matrix)
    caught = "caught" if one.negative_control_caught else "NOT caught"
    rows.append(_row(one.dtype, f"same bits as alone: {cells}; negative control {caught}"))
    peaks = ", ".join(_peak(one, name) for name in one.peak_rss_bytes)
    rows.append(_row("", f"backend {one.backend}; {peaks}"))
    return rows


def _peak(one: Pass, name: str) -> str:
    """`oracle 41 s, peak memory 7.9 GB (15.4 GB with mapped files)`."""
    resident, own = format_bytes(one.peak_rss_bytes[name]), one.peak_own_bytes[name]
    memory = resident if own is None else f"{format_bytes(own)} ({resident} with mapped files)"
    return f"{name} {one.seconds[name]:.0f} s, peak memory {memory}"


def _cell(cell: Any) -> str:
    verdict = {True: "yes", False: "NO", None: "not reached"}[cell["is_equal"]]
    return f"{cell['name'].replace('_', ' ')} {verdict}"


def _shown(what: str, names: Sequence[str]) -> list[str]:
    more = len(names) - SHOWN
    return [f"{what}: {name}" for name in names[:SHOWN]] + ([f"{what}: {more} more"] if more > 0 else [])


def _tensor_rows(found: Verification) -> list[str]:
    if found.unconsumed or found.unfilled:
        named = _shown("fills nothing", found.unconsumed) + _shown("filled by nothing", found.unfilled)
        return [_row("tensors", text) for text in named]
    unused = sum(tensor["num_bytes"] for tensor in found.known_unused)
    text = "every tensor consumed, every parameter filled"
    if found.known_unused:
        text += f"; {len(found.known_unused)} known and unused, {format_bytes(unused)}"
    rows = [_row("tensors", text)]
    return rows + [
        _row("", f"{tensor['key']}: {format_bytes(tensor['num_bytes'])}, {tensor['reason']}")
        for tensor in found.known_unused[:SHOWN]
    ]
