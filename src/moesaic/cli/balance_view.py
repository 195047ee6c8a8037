"""A balance, a check and a difference as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import fill

import numpy as np

from moesaic.cli.heat_map import ASCII_SHADES
from moesaic.interop.dump import Dump
from moesaic.placement.balance import POLICIES
from moesaic.planner.balance import Balance, Case, Formulas, Outcome
from moesaic.planner.balance_check import Difference, Finding
from moesaic.spec.experts import FloatArray
from moesaic.units import format_bytes, format_count, format_seconds

LINE = 110
MAX_STRIP = 32  # characters of a line of GPUs


def render(found: Balance, num_layers: int) -> str:
    """The whole answer."""
    parts = [_head(found), _policies(found), _chosen(found), _layers(found, num_layers), _advice(found)]
    return "\n".join(part for part in parts if part)


def _head(found: Balance) -> str:
    case = found.case
    lines = [_load_line("load", dump) for dump in case.dumps]
    lines += [_load_line("held out", dump) for dump in case.holdouts]
    experts = found.loads_SLE.shape[2]
    per_gpu = found.num_slots // case.num_gpus
    nodes = f" on {case.num_nodes} nodes" if case.num_nodes > 1 else ""
    rounded = ""
    if case.num_slots is None and case.current is not None:
        rounded = " (the current plan's)"
    elif found.num_slots != (case.num_slots or experts):
        rounded = f" (rounded up from {case.num_slots or experts})"
    lines.append(
        f"slots     {found.num_slots}{rounded}: {case.num_gpus} GPUs{nodes} x {per_gpu}, {experts} experts, "
        f"{max(found.num_slots - experts, 0)} redundant"
    )
    return "\n".join(lines)


def _load_line(label: str, dump: Dump) -> str:
    dense = len(dump.counts_LE) - len(dump.sparse_rows)
    text = f"{label:<9} {_short(dump.source)}: {dump.layout}, {len(dump.sparse_rows)} sparse layers"
    text += f" (+ {dense} all zero: dense, left out)" if dense else ""
    text += f", {format_count(float(dump.counts_LE.sum()))} choices"
    if dump.num_zero_steps:
        text += f", {dump.num_zero_steps} zero steps dropped"
    return "\n".join([_wrapped(text, "", " " * 12), *(" " * 12 + note for note in dump.notes)])


def _short(source: str) -> str:
    """The last part of a path; an address stays."""
    return source if "://" in source else source.rstrip("/").rsplit("/", 1)[-1]


def _policies(found: Balance) -> str:
    """One row a policy: mean over layers of mean / max GPU load."""
    columns = _columns(found)
    lines = ["", "mean / max GPU load, mean over layers; copies share evenly, or solved for each load"]
    lines.append(f"{'policy':<18}" + "".join(f"{head:>{width}}" for head, width, _ in columns))
    for one in found.outcomes:
        mark = "*" if one.name == found.chosen else " "
        cells = "".join(f"{show(one):>{width}}" for _, width, show in columns)
        lines.append(f"{one.name:<17}{mark}{cells}")
    notes = [f"not run: {name}: {reason}" for name, reason in found.unfit.items()]
    start = "the current plan" if found.case.current is not None else "experts in the order of their ids"
    notes.append(f"* chosen: {POLICIES[found.chosen].summary}; moves and bytes from {start}")
    return "\n".join([*lines, *(_wrapped(note, "  ", "    ") for note in notes + _traffic(found.outcomes))])


def _columns(found: Balance) -> list[tuple[str, int, Callable[[Outcome], str]]]:
    """(heading, width, cell), only those that say something here."""
    has_several, has_others = len(found.case.dumps) > 1, bool(found.case.holdouts)
    several_others = len(found.case.holdouts) > 1
    columns: list[tuple[bool, str, int, Callable[[Outcome], str]]] = [
        (True, "planned for", 12, lambda one: _ratio(one.on_load)),
        (has_several, "worst", 8, lambda one: _ratio(one.on_load_min)),
        (has_others, "others", 8, lambda one: _ratio(one.holdout_mean)),
        (several_others, "worst", 8, lambda one: _ratio(one.holdout_min)),
        (True, "solved", 9, lambda one: _ratio(one.on_load_solved)),
        (has_others, "others", 8, lambda one: _ratio(one.holdout_mean_solved)),
        (several_others, "worst", 8, lambda one: _ratio(one.holdout_min_solved)),
        (True, "moves", 8, lambda one: str(one.num_moves)),
        (
            found.case.model is not None,
            "bytes",
            9,
            lambda one: "-" if one.move_bytes is None else format_bytes(one.move_bytes),
        ),
        (True, "same GPU", 10, lambda one: str(one.same_rank_replicas)),
        (True, "time", 9, lambda one: format_seconds(one.seconds)),
    ]
    return [column[1:] for column in columns if column[0]]


def _wrapped(text: str, first: str, rest: str) -> str:
    return fill(text, LINE, initial_indent=first, subsequent_indent=rest, break_long_words=False)


def _traffic(outcomes: Sequence[Outcome]) -> list[str]:
    """What is sent: only where the case says enough to know."""
    found = []
    for label, name in (
        ("tokens received, max / mean GPU", "receive_skew"),
        ("choices with a copy on their own node", "local_share"),
        ("pairs of experts on different nodes", "crossing_share"),
    ):
        values = [(one.name, getattr(one, name)) for one in outcomes if getattr(one, name) is not None]
        if values:
            found.append(f"{label}: " + ", ".join(f"{policy} {value:.3f}" for policy, value in values))
    return found


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _chosen(found: Balance) -> str:
    """Formulas side by side, and the price of copies."""
    lines = ["", f"{'':<18}{'vLLM':>9}{'SGLang':>9}{'TensorRT-LLM':>14}"]
    for label, one in (("before", found.formulas_before), (found.chosen, found.formulas_after)):
        lines.append(f"{label:<18}" + _formulas(one))
    lines.append("  sum mean / sum max; mean of mean / max; mean of (max - mean) / mean, over layers")
    if found.memory is not None:
        memory = found.memory
        lines.append(
            f"memory    a redundant slot a GPU is {format_bytes(memory.slot_bytes)} over the sparse "
            "layers; copies take "
            f"{format_bytes(memory.redundant_bytes)} a GPU,"
        )
        lines.append(
            f"          the KV of {memory.sequences_lost} sequences of {memory.context} positions "
            f"({format_bytes(memory.sequence_bytes)} each)"
        )
    return "\n".join(lines)


def _formulas(one: Formulas) -> str:
    return f"{one.vllm:>9.4f}{one.sglang:>9.4f}{one.trtllm:>14.4f}"


def _layers(found: Balance, num_layers: int) -> str:
    """The least even layers before, GPU by GPU."""
    if not num_layers:
        return ""
    order = np.argsort(-found.before.max(axis=1), kind="stable")[:num_layers]
    width = min(found.before.shape[1], MAX_STRIP)
    what = "GPU" if width == found.before.shape[1] else "the busiest of neighbouring GPUs"
    lines = ["", f"the {len(order)} least even layers, load over the mean; a character is one {what}"]
    lines[-1] = lines[-1].replace("one the", "the")
    lines.append(f"{'layer':>7}  {'before':<{width + 8}}  {'after':<{width + 8}}  most copies")
    for row in sorted(order.tolist()):
        shown = [f"{part[row].max():5.2f} |{_strip(part[row])}|" for part in (found.before, found.after)]
        copies = found.copies_LE[row]
        hot = np.argsort(-copies, kind="stable")[:3]
        text = ", ".join(f"{expert} x {copies[expert]}" for expert in hot.tolist() if copies[expert] > 1)
        lines.append(f"{found.layer_idxs[row]:>7}  {shown[0]}  {shown[1]}  {text or '-'}")
    return "\n".join(lines)


def _strip(load_G: FloatArray) -> str:
    """A shade a GPU: idle is blank, twice the mean or more the darkest."""
    per = -(-len(load_G) // MAX_STRIP)
    padded = np.concatenate([load_G, np.zeros(-len(load_G) % per)]).reshape(-1, per).max(axis=1)
    last = len(ASCII_SHADES) - 1
    return "".join(ASCII_SHADES[min(last, round(float(value) / 2 * last))] for value in padded)


def _advice(found: Balance) -> str:
    """What to do next."""
    chosen = found.outcome(found.chosen)
    advice = []
    if chosen.holdout_mean is not None and chosen.holdout_mean < 0.9 and found.chosen != "robust":
        advice.append("other traffic unbalances this plan: give several LOADs, and robust serves them all")
    elif len(found.case.dumps) == 1 and chosen.holdout_mean is None:
        advice.append(
            "planned for one load: --holdout says how it holds on another, several LOADs make it hold"
        )
    if found.case.num_nodes > 1 and chosen.local_share is not None and chosen.local_share < 0.5:
        advice.append(
            "most choices cross nodes: keep expert parallelism in a node if its links are the limit"
        )
    if found.memory is not None and found.memory.redundant_bytes:
        advice.append("copies cost memory: fewer bits an expert come first, then copies")
    advice.append("record again when traffic changes: decode every ten minutes or so, prefill more often")
    return "\n".join(["", *(f"{'' if i else 'advice':<10}{line}" for i, line in enumerate(advice))])


def render_check(dump: Dump, findings: tuple[Finding, ...]) -> str:
    """What is wrong with a dump, or that nothing is."""
    faults = sum(one.level == "fault" for one in findings)
    verdict = "sound" if not faults else f"not sound: {faults} fault{'s' if faults > 1 else ''}"
    lines = [
        f"{dump.source}: {dump.layout}, {dump.num_experts} experts, {len(dump.sparse_rows)} sparse "
        f"layers: {verdict}"
    ]
    for one in findings:
        lines.append(_wrapped(f"{one.level:<8}{one.kind:<18}{one.message}", "  ", " " * 28))
    return "\n".join(lines)


def render_diff(names: Sequence[str], case: Case, found: Difference) -> str:
    """What changed, and what it costs to stay."""
    start = "the current plan" if case.current is not None else f"a plan for {names[0]}"
    lines = [
        f"from {names[0]} to {names[1]}",
        f"  {found.distance:.1%} of the choices went to other experts, {found.distance_max:.1%} in layer "
        f"{found.distance_max_layer}",
        "  largest shifts, share of a layer's choices:",
    ]
    lines += [
        f"    layer {one.layer_idx:>3} expert {one.expert:>4}  {one.share_before:6.2%} -> "
        f"{one.share_after:6.2%}"
        for one in found.shifts
    ]
    lines += [
        f"  {start}: {found.old_on_old:.4f} mean / max GPU load then, {found.old_on_new:.4f} now; a new plan "
        f"{found.new_on_new:.4f}",
        f"  if the old plan stays, the busiest GPU takes {found.loss:+.0%} of time",
    ]
    return "\n".join(lines)
