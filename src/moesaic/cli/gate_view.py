"""A gate study on one screen: what was simulated, the tables, the load as bars, what to conclude."""

from __future__ import annotations

from moesaic.planner.sim.case import NUM_REQUESTS, GateReport, Variant

BAR_WIDTH = 28
MAX_BARS = 16


def render(report: GateReport) -> str:
    """The report as text of at most 110 columns."""
    case = report.case
    lines = [
        f"{case.num_experts} experts, top-{case.experts_per_token}, {case.num_tokens} tokens, "
        f"{case.num_topics} topics of strength {case.strength:g}, "
        f"{case.share:.0%} of a topical batch from one; seed {case.seed}",
        "",
        *_draws(report),
        "",
        *_variants(report),
        "",
        *_bars(report),
        "",
        *_notes(report),
        "",
        f"Holds when:  {_holds(report)}",
        f"Fails when:  {_fails(report)}",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _draws(report: GateReport) -> list[str]:
    factors = list(report.draws[0].dropped_share)
    title = f"{report.draws[0].num_draws} draws of gate and batch"
    head = "".join(f"{'dropped, CF ' + factor:>20}" for factor in factors)
    lines = [f"{title:<34}{'hottest / mean (range)':>24}{head}"]
    for one in report.draws:
        ratio = f"{one.max_mean:.2f} ({one.max_mean_least:.2f} to {one.max_mean_greatest:.2f})"
        shares = "".join(f"{one.dropped_share[factor]:>20.1%}" for factor in factors)
        lines.append(f"  {one.name:<32}{ratio:>24}{shares}")
    return lines


def _variants(report: GateReport) -> list[str]:
    case = report.case
    lines = [
        f"one gate, one batch; capacity factor (CF) {case.capacity_factor:g}: C = {report.capacity} "
        "pairs an expert takes",
        f"{'':37}{'hottest':>8}{'CV^2':>12}{'CV^2':>8}{'sum of':>9}{'dropped':>9}"
        f"{'neighbours move outputs':>27}",
        f"  {'gate':<23}{'tokens':<12}{'/ mean':>8}{'importance':>12}{'load':>8}{'weights':>9}{'at CF':>9}"
        f"{'at CF':>14}{'dropless':>13}",
    ]
    for one in report.variants:
        moved = [""]
        if one.neighbours is not None:
            dropless = one.neighbours.change_dropless
            moved = [
                f"{one.neighbours.change_capacity:>14.0%}",
                f"{'no bit' if dropless == 0 else f'{dropless:.1e}':>13}",
            ]
        lines.append(
            f"  {one.name:<23}{one.tokens:<12}{one.max_mean:>8.2f}{one.importance_cv2:>12.3f}"
            f"{one.load_cv2:>8.3f}{one.weight_sum:>9.2f}{one.dropped_share:>9.1%}{''.join(moved)}"
        )
    return lines


def _bars(report: GateReport) -> list[str]:
    before, after = _bias_rows(report)
    order = list(range(len(before.load)))
    title = "load per expert, sigmoid gate on the topical batch (| is the mean)"
    if len(before.load) > MAX_BARS:
        hottest = sorted(order, key=lambda expert_id: (-before.load[expert_id], expert_id))
        order = sorted(hottest[:MAX_BARS])
        title += f"; the {MAX_BARS} hottest of {len(before.load)}"
    mean = sum(before.load) / len(before.load)
    unit = max(max(before.load), max(after.load)) / BAR_WIDTH
    lines = [title, f"  expert  {'before':<{BAR_WIDTH + 9}}after learning a selection bias"]
    for expert_id in order:
        parts = [
            f"{load:>5} {_bar(load / unit, mean / unit):<{BAR_WIDTH + 3}}"
            for load in (before.load[expert_id], after.load[expert_id])
        ]
        lines.append(f"  {expert_id:>6}{''.join(parts)}")
    return lines


def _bar(length: float, mark: float) -> str:
    cells = ["#"] * round(length) + [" "] * BAR_WIDTH
    cells[round(mark)] = "|"
    return "".join(cells[: BAR_WIDTH + 1]).rstrip()


def _notes(report: GateReport) -> list[str]:
    case = report.case
    importances = " ".join(f"{importance:g}" for importance in report.example_importance)
    loads = " ".join(str(load) for load in report.example_load)
    return [
        "trained: noisy top-k on balance losses alone, weights "
        f"{case.importance_weight:g} (importance) and {case.load_weight:g} (load); its load",
        f"  estimator ends at {report.smooth_max_mean:.2f} x the mean. "
        "The paper, arXiv:1701.06538, has 1.07 x at weights 1 and 1.",
        f"even importance is not even load: importance {importances} with load {loads} is one such batch.",
        f"neighbours: {NUM_REQUESTS} tokens behind two sets of others; "
        "% is the change by the norm of the outputs. Dropless keeps",
        "  every bit when sums have a fixed order; "
        f"numpy's own product moved a number by {report.change_blas:.1e} here.",
    ]


def _bias_rows(report: GateReport) -> tuple[Variant, Variant]:
    return (
        report.variant("sigmoid, renormalised", "topical"),
        report.variant("sigmoid + learnt bias", "topical"),
    )


def _holds(report: GateReport) -> str:
    before, after = _bias_rows(report)
    if after.max_mean >= before.max_mean:
        return f"not seen here: a learnt bias left the hottest expert at {after.max_mean:.2f} x the mean load"
    return (
        f"the mix of topics stays: a learnt bias took the hottest expert from {before.max_mean:.2f} to "
        f"{after.max_mean:.2f} x the mean load"
    )


def _fails(report: GateReport) -> str:
    after = _bias_rows(report)[1]
    moved = report.variant("sigmoid + learnt bias", "topic moved")
    unlearnt = report.variant("sigmoid, renormalised", "topic moved")
    plain = report.variant("top-k, then softmax", "topical")
    parts = []
    if moved.max_mean > after.max_mean:
        parts.append(f"the topic moves ({moved.max_mean:.2f} x; {unlearnt.max_mean:.2f} without the bias)")
    if plain.neighbours is not None and plain.neighbours.change_capacity > 0:
        parts.append(f"pairs are dropped ({plain.dropped_share:.0%}): batch_dependent")
    return (
        ", or ".join(parts) or "not seen here: no load moved with the topic and no watched pair was dropped"
    )
