"""The frame of a self-contained page, and plots put below each other. Knows text and SVG, no plan."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}}
pre{{background:#f6f6f6;padding:1rem;overflow-x:auto;font-size:12.5px}} svg{{max-width:100%;height:auto}}
h1{{font-size:1.5rem}} h2{{font-size:1.1rem;margin-top:2rem}} p{{max-width:45rem}}
</style></head><body>
<h1>{title}</h1>
"""
PAGE_END = "</body></html>\n"


def page_head(title: str) -> str:
    """A page up to its heading."""
    return _HEAD.format(title=escape(title))


def stacked_plots(plots: Sequence[tuple[str, str]]) -> str:
    """(heading, SVG) below each other as one SVG."""
    parts, top, width = [], 0.0, 0.0
    for head, plot in plots:
        box = re.search(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', plot)
        if box is None:
            continue
        width = max(width, float(box[1]))
        parts.append(
            f'<text x="8" y="{top + 16:.0f}" font-size="12" font-weight="bold">{escape(head)}</text>'
        )
        parts.append(plot.replace("<svg", f'<svg x="0" y="{top + 22:.0f}"', 1).replace('pt"', '"'))
        top += 30 + float(box[2])
    box_of_all = f'viewBox="0 0 {width:.0f} {top:.0f}" font-family="sans-serif"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box_of_all}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])
