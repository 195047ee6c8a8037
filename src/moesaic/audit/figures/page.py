"""The table of figures as a page of Markdown. Says what each figure should be; computes none."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

from moesaic.audit.figures.registry import computations
from moesaic.audit.figures.table import VERDICTS, Figure, figures

HEAD = """# Figures

Four texts on MoE inference (S000 and S002 on serving, S003 an introduction, S004 a lecture with exercises)
state 354 figures. `moesaic figures` recomputes those that follow from their inputs, with the functions that
plan and run models, and says which figures are wrong and what is right.

```
moesaic figures                        # all; exit code 3 if a computed value does not agree with the table
moesaic figures S004-056 "exercise 4"  # ids, texts or sections
moesaic figures --wrong                # what is wrong, the right value, why
moesaic figures --exercise 7           # 1 to 9, worked
moesaic figures --demo helix           # or layer, cost, decode, pingpong
moesaic figures --demo decisions       # or selftest, misconceptions: tables
moesaic figures --json
```

`--json` has for each figure `id`, `verdict`, `basis`, `seed_value` (what the text says), `value` (ours) and
`ok`, then `unit`, `computed`, `claim`, `note`. `ok` says whether a computed value is as near to the table's
as its tolerance asks, or where there is none, whether the relation of the claim holds; of a wrong claim, the
right one. Nothing is computed for figures that are a source's word: their `ok` is null, and so is `value`, or
it is the correction where the figure is wrong.

*Right* and *wrong* are about the claim. *Underspecified* figures hold for some reading of their inputs only.
*Unverifiable* ones have no source that was found. *Paper-reported* ones are a paper's own measurements.
"""


def page() -> str:
    """Counts, then every figure by section."""
    rows, known = figures(), computations()
    lines = [HEAD, "| verdict | figures | computed |", "|---|--:|--:|"]
    of = Counter(row.verdict for row in rows)
    computed = Counter(row.verdict for row in rows if row.id in known)
    lines += [f"| {verdict} | {of[verdict]} | {computed[verdict]} |" for verdict in VERDICTS]
    for (text, section), group in groupby(rows, key=lambda row: (row.id.split("-")[0], row.section)):
        lines += [
            "",
            f"## {text}, {section}",
            "",
            "| figure | verdict | claim | says | should be | |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_line(row, row.id in known) for row in group]
    return "\n".join(lines) + "\n"


def _line(row: Figure, is_computed: bool) -> str:
    verdict = f"{row.verdict}, computed" if is_computed else row.verdict
    cells = (
        row.id,
        verdict,
        row.claim,
        _value(row.seed_value, row),
        _value(row.recomputed_value, row),
        row.note,
    )
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _value(value: Any, row: Figure) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        shown = ", ".join(_number(one) for one in value)
    elif isinstance(value, dict):
        shown = ", ".join(f"{key.replace('_', ' ')} {_number(one)}" for key, one in value.items())
    else:
        shown = _number(value)
    has_unit = row.unit not in (None, "bool") and not isinstance(value, str | bool | dict)
    return f"{shown} {row.unit}" if has_unit else shown


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
    )
