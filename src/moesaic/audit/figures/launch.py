"""Figures about flags, variables and names of other engines: what the lint says of a line with them."""

from __future__ import annotations

from moesaic.audit.figures.registry import figure
from moesaic.interop.lint import lint


@figure("S002-039", "S002-045", "S002-097", "S003-030", "S003-031", holds=lambda instead: bool(instead))
def written_instead(line: str) -> str | None:
    """What to write instead of the first wrong word of a line."""
    found = [one for report in lint(line) for one in report.findings]
    return found[0].suggestion if found else None


@figure("S002-038", holds=lambda rules: "no-effect-on-all-to-all" in rules)
def rules_broken(line: str) -> list[str]:
    """Rules that a line breaks."""
    return sorted({one.rule for report in lint(line) for one in report.findings})


@figure("S002-040", "S003-032", holds=lambda count: count == 0)
def num_findings(line: str) -> int:
    """How many words of a line are wrong or without effect."""
    return sum(len(report.findings) for report in lint(line))
