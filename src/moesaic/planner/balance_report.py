"""A picture of the load before and after: as one SVG, or on a page with the text. Needs matplotlib."""

from __future__ import annotations

from html import escape

import numpy as np

from moesaic.planner import balance_charts as charts
from moesaic.planner.balance import Balance
from moesaic.planner.page import PAGE_END, page_head, stacked_plots


def page(title: str, text: str, found: Balance) -> str:
    """The page as HTML. `text` is the answer as the terminal shows it."""
    parts = [page_head(title), f"<pre>{escape(text)}</pre>\n"]
    parts += [
        f"<h2>{escape(head)}</h2>\n<p>{escape(words)}</p>\n{plot}\n" for head, words, plot in _sections(found)
    ]
    return "".join([*parts, PAGE_END])


def picture(found: Balance) -> str:
    """The plots of the page below each other, as one SVG."""
    return stacked_plots([(head, plot) for head, _, plot in _sections(found)])


def _sections(found: Balance) -> list[tuple[str, str, str]]:
    """(heading, explanation, plot)."""
    worst = int(found.before.max(axis=1).argmax())
    layer = found.layer_idxs[worst]
    outcomes = [one for one in found.outcomes if one.holdout_mean is not None] or list(found.outcomes)
    rows = {one.name: (one.on_load, one.holdout_mean) for one in outcomes}
    return [
        (
            f"Load of each GPU, {found.chosen}",
            "Rows over the mean, every layer; dark is idle, bright the busiest. The same colours before "
            "and after.",
            charts.heat_maps(
                {"before": found.before, "after": found.after}, found.layer_idxs, "GPU", "layer"
            ),
        ),
        (
            f"Layer {layer}, the least even one before",
            "GPUs from the busiest to the idlest; a step ends with the tallest.",
            charts.before_after(
                np.sort(found.before[worst])[::-1], np.sort(found.after[worst])[::-1], "GPU", "load / mean"
            ),
        ),
        (
            "Policies",
            "Mean over layers of mean / max GPU load: on the loads planned for, and on others.",
            charts.grouped_bars(rows, ("planned for", "others"), "balancedness"),
        ),
    ]
