"""`moesaic accuracy`: predicted against measured serving times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # heavy: each function imports what it needs, --help nothing
    from moesaic.audit.accuracy import Accuracy, Errors


def accuracy_command(
    rows: Annotated[Path, typer.Option("--rows", help="CSV of measured serving times, plain or gzip.")],
    peer: Annotated[
        Path | None, typer.Option("--peer", help="CSV of another planner's times: id, ttft, tpot (ms).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/accuracy.md.")] = False,
) -> None:
    """Say how far the planner's times are from measured ones, and another planner's on the same rows."""
    from moesaic.audit.accuracy import accuracy

    found = accuracy(rows, peer)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2, allow_nan=False))
    else:
        typer.echo(render_markdown(found) if markdown else render(found))


def render(found: Accuracy) -> str:
    """The report as text."""
    lines = [f"{found.num_rows} usable rows"]
    lines += [f"  dropped {count}: {reason}" for reason, count in found.dropped.items()]
    for title, errors in _parts(found):
        lines += ["", title, *_table(errors)]
    for dim, values in found.slices.items():
        lines += ["", f"by {dim}"]
        for name, errors in values.items():
            lines += [f"  {name}", *_table(errors)]
    return "\n".join(lines)


def render_markdown(found: Accuracy) -> str:
    """The report as a page."""
    lines = [
        "# Accuracy",
        "",
        "Predicted against measured time per output token (TPOT) and time to first token (TTFT) of public",
        "serving benchmarks, by `moesaic accuracy`. Every row is predicted by a calibration that was fitted",
        "without the row's whole (model, GPU) group. APE is the absolute error by the measured time; the",
        "interval is the 80 % interval, its width the median of high by low; rank is the mean rank",
        "correlation inside a group.",
        "",
        f"{found.num_rows} rows of {found.num_aggregated} aggregated ones are usable. Dropped, by what was",
        "run, never by how long it took:",
        "",
        "| rows | reason |",
        "|--:|---|",
        *(f"| {count} | {reason} |" for reason, count in found.dropped.items()),
    ]
    for title, errors in _parts(found):
        lines += [
            "",
            f"## {title[:1].upper()}{title[1:]}",
            "",
            *_HEAD,
            *(_row("", t, e) for t, e in errors.items()),
        ]
    for dim, values in found.slices.items():
        lines += ["", f"## By {dim}", "", *_HEAD]
        lines += [
            _row(name, target, one) for name, errors in values.items() for target, one in errors.items()
        ]
    return "\n".join([*lines, "", *_how(), ""])


def _how() -> list[str]:
    """How the predictions are made, and what they are worth with less knowledge."""
    from moesaic.cost.calibrated import stricter_errors

    found = stricter_errors()
    titles = {
        "physics": "the same groups left out, without the correction",
        "engine": "the same groups left out, by one who does not know the engine",
        "plan": "the same, as `moesaic plan` says it",
        "model": "every row of the model left out, on all GPUs",
        "gpu": "every row of the GPU left out, for all models",
    }
    return [
        "## How, and with less knowledge",
        "",
        "`moesaic.cost.calibrated.predict` prices a step by its operators with a few fitted numbers (shares",
        "of peaks, launch times, queueing: `cost/serving.py`), then multiplies by a correction: effects of",
        "backend, model, weight format and load, shrunk towards none (`cost/correction.py`). So a model that",
        "was measured on one GPU is corrected on another; of a new model only the effects of its backend and",
        "format are known, and its interval is wider. `moesaic plan` takes of the correction what holds for",
        "every layout, for the mean of the engines ([planner](planner.md#how-wrong-it-is)).",
        "",
        "Every fit starts from the same values and sees none of what it leaves out. How strongly effects",
        "are shrunk is chosen inside of what a fit may see (nested cross-validation, the most shrunk choice",
        "within a standard error of the best); the figures above are of such fits. By hand are set, the",
        "same for all fits: the form of the physics, the stiffness of its numbers, what counts as an",
        "outlier (chosen as well, TTFT comes out at 24.0 % and 78.6 %, and 21.1 % and 74.7 % on the shared",
        "rows), and how far the interval is short of 80 % to stay narrow. The interval of a group comes",
        "from the errors of the others. For the rows by model and by GPU below, what is left out was left",
        "out of the errors that choose, not of all fits behind them.",
        "",
        "Pools that only decode are predicted by the step without prompts, and are in no other figure. No",
        "fit saw such a row. Their times to the first token, which wait for the other pool, are not",
        "predicted.",
        "",
        "| mixture-of-experts rows | TPOT median | 90 % | TTFT median | 90 % |",
        "|---|--:|--:|--:|--:|",
        *(f"| {title} | {_cells(found[sort])} |" for sort, title in titles.items()),
    ]


def _cells(errors: Mapping[str, tuple[float, float]]) -> str:
    return " | ".join(_percent(one) for target in ("tpot", "ttft") for one in errors[target])


_HEAD = (
    "| | | rows | median APE | 90 % APE | in interval | width | rank |",
    "|---|---|--:|--:|--:|--:|--:|--:|",
)


def _parts(found: Accuracy) -> list[tuple[str, Mapping[str, Errors]]]:
    parts = [("mixture-of-experts models", found.moe), ("dense models", found.dense)]
    if found.peer:
        parts.append(("shared rows, ours", found.ours_shared))
        parts.append(("shared rows, the other planner", found.peer))
    parts.append(("mixture-of-experts models, pools that only decode", found.decoders))
    return [(title, errors) for title, errors in parts if errors]


def _row(name: str, target: str, one: Errors) -> str:
    cells = [_percent(one.median_ape), _percent(one.p90_ape), _percent(one.coverage_80), _plain(one.width)]
    return f"| {name} | {target.upper()} | {one.n} | {' | '.join(cells)} | {_plain(one.rank_corr)} |"


def _table(errors: Mapping[str, Errors]) -> list[str]:
    lines = []
    for target, one in errors.items():
        spread = f"in interval {_percent(one.coverage_80):>7}  width {_plain(one.width):>5}"
        ape = f"median {_percent(one.median_ape):>7}  90 % {_percent(one.p90_ape):>7}"
        rank = f"rank {_plain(one.rank_corr):>5}"
        lines.append(f"    {target.upper()}  {one.n:5d} rows  {ape}  {spread}  {rank}")
    return lines


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
