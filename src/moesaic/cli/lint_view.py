"""The text of `moesaic lint`: findings of launch lines, of prompts, of a measured all-to-all."""

from __future__ import annotations

from moesaic.interop.inventory import TITLES
from moesaic.interop.lint import LineReport
from moesaic.interop.nccl_tests import Judgement
from moesaic.text.stability import BLOCK, Stability
from moesaic.units import format_bytes


def render_line(report: LineReport) -> str:
    """The findings of one launch line."""
    name = TITLES.get(report.engine, report.program)
    head = f"{name} {report.version or ''}".strip()
    if report.basis == "documented":
        head += ", documented only: its parser was not read"
    if report.asked is not None and report.asked != report.version:
        head += f", the nearest known release to {report.asked}"
    if report.model is not None:
        head += f", model {report.model}"
    if not report.findings:
        return f"{head}\n  ok          nothing is wrong"
    lines = [head]
    for one in report.findings:
        lines.append(f"  {one.severity:<10}  {one.message} [{one.rule}]")
        if one.suggestion is not None:
            lines.append(f"              instead: {one.suggestion}")
    return "\n".join(lines)


def render_prompts(name: str, found: Stability) -> str:
    """What is unstable in a file of prompts, and what it costs."""
    lines = [
        f"{name}: {found.num_prompts} prompts, a prefix cache with blocks of {BLOCK} {found.unit}",
        f"  hit rate    {found.hit_rate:.1%} of all {found.unit}; "
        f"{found.hit_rate_after:.1%} with what is unstable at the end",
    ]
    if not found.findings:
        lines.append("  ok          nothing unstable in what the prompts share")
    for one in found.findings:
        lines += [
            f"  {one.severity:<10}  {one.kind} in {one.path}, character {one.position}, differs in "
            f"{one.num_prompts} prompts: {one.before!r}, then {one.after!r}",
            f"              {one.lost_share:.0%} of a prompt is computed anew for it",
            f"              instead: {one.suggestion}",
        ]
    return "\n".join(lines)


def render_all_to_all(name: str, machine: str, found: Judgement) -> str:
    """Whether a measured all-to-all is what the links allow."""
    return "\n".join(
        [
            f"{name}: all-to-all of {found.num_ranks} ranks, judged as {machine}",
            f"  {found.verdict:<10}  {found.reason}",
            f"  bound       {format_bytes(found.peak)}/s a rank over the {found.bound_by}; "
            f"asked for {format_bytes(found.at_least)}/s",
        ]
    )
