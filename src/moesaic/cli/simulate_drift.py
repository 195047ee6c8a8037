"""`moesaic simulate drift`: placements under traffic whose topic changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.cli.simulate_layer import Json, Seed, Svg
from moesaic.cli.simulate_output import charts, show, write_svg

if TYPE_CHECKING:
    from moesaic.planner.sim.drift import DriftReport

COLUMNS = 96  # of a row of balance over time


def drift_command(
    *,
    experts: Annotated[int, typer.Option(help="Experts of the layer.")] = 64,
    top_k: Annotated[int, typer.Option(help="Experts of a token.")] = 6,
    gpus: Annotated[int, typer.Option(help="GPUs.")] = 8,
    redundant: Annotated[int, typer.Option(help="Further slots, over all GPUs.")] = 16,
    topics: Annotated[int, typer.Option(help="Topics; the first becomes the second.")] = 3,
    skew: Annotated[float, typer.Option(help="Zipf exponent of each topic.")] = 0.8,
    drift_s: Annotated[int, typer.Option(help="How long the change takes; 0: at once.")] = 60,
    fetch_s: Annotated[float, typer.Option(help="Until an expert is on another GPU, all layers.")] = 0.25,
    replan_s: Annotated[int, typer.Option(help="Interval of the placement planned anew.")] = 60,
    window_s: Annotated[float, typer.Option(help="Of the load that decides.")] = 30.0,
    add_above: Annotated[
        float | None, typer.Option(help="Load of a copy, by the mean slot, above which it gets another.")
    ] = None,
    drop_below: Annotated[
        float | None, typer.Option(help="Load that a copy would have with one fewer, below which it goes.")
    ] = None,
    seed: Seed = 0,
    svg: Svg = None,
    as_json: Json = False,
) -> None:
    """Traffic of one topic becomes another's: fixed placement, planning at intervals, copies by rule."""
    from moesaic.placement.trigger import ReplicaRule
    from moesaic.planner.sim.drift import DriftCase, study_drift

    plots = charts(svg)
    given = {"add_above": add_above, "drop_below": drop_below}
    rule = ReplicaRule(
        window_s=window_s, **{name: value for name, value in given.items() if value is not None}
    )
    case = DriftCase(
        num_experts=experts, experts_per_token=top_k, num_gpus=gpus, num_redundant=redundant,
        num_topics=topics, skew=skew, drift_s=drift_s, fetch_s=fetch_s, replan_s=replan_s, seed=seed,
    )  # fmt: skip
    report = study_drift(case, rule)
    if plots is not None and svg is not None:
        lines = {row.name: (list(range(case.duration_s)), row.series) for row in report.rows}
        write_svg(svg, plots.lines(lines, "s", "mean GPU / busiest"))
    show(report, _text(report), is_json=as_json)


def _text(report: DriftReport) -> str:
    case, rule = report.case, report.rule
    end_s = case.before_s + case.drift_s
    lines = [
        f"{case.num_experts} experts, top-{case.experts_per_token}, {case.num_redundant} copies over "
        f"{case.num_gpus} GPUs; topic 1 becomes topic 2 from {case.before_s} to {end_s} s; seed {case.seed}",
        f"rule: over {rule.window_s:g} s a copy above {rule.add_above:g} x the mean slot gets another, one "
        f"goes if the rest stay below {rule.drop_below:g} x",
        "",
        f"{'':<18}{'balance (mean GPU / busiest)':>38}{'even again':>12}{'':>9}{'experts':>9}{'copies':>9}",
        f"{'placement':<18}{'before':>10}{'drift':>9}{'after':>9}{'worst':>10}{'after':>12}{'changes':>9}"
        f"{'moved':>9}{'returned':>9}",
    ]
    for row in report.rows:
        drift = "-" if row.drift is None else f"{row.drift:.3f}"
        lines.append(
            f"{row.name:<18}{row.before:>10.3f}{drift:>9}{row.after:>9.3f}{row.worst:>10.3f}"
            f"{row.recovered_s:>10} s{row.num_changes:>9}{row.num_moves:>9}{row.num_returns:>9}"
        )
    lines += [
        "  returned: copies wanted again within a minute of being dropped; many of them are flapping",
        "",
    ]
    for row in report.rows[1:]:
        step = len(row.series) / COLUMNS
        cells = [row.series[int((i + 0.5) * step)] for i in range(COLUMNS)]
        lines += [f"{row.name}, balance in tenths:", "  " + "".join(str(min(int(x * 10), 9)) for x in cells)]
    return "\n".join(lines)
