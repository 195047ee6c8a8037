"""Expert counts as a picture: one line per MoE layer, one cell per expert or group of neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from moesaic.spec.experts import IntArray

ASCII_SHADES = " .:-=+*#%@"
BLOCK = "\u2588"
# Dark to bright, readable on dark and light terminals: 24-bit colours of the "inferno" map.
_COLOURS = ("#1b0c41", "#4a0c6b", "#781c6d", "#a52c60", "#cf4446", "#ed6925", "#fb9b06", "#f7d13d", "#fcffa4")


def shades(counts: IntArray, width: int) -> list[float]:
    """Brightness 0 to 1 of at most `width` cells, relative to the layer's hottest cell; never fired is 0.

    Neighbouring experts share a cell when there are more of them than cells; it shows the hottest of them.

    Shapes:  counts [E] int64.
    """
    per_cell = -(-len(counts) // width)
    padded = np.zeros(-(-len(counts) // per_cell) * per_cell, dtype=np.int64)
    padded[: len(counts)] = counts
    cells = padded.reshape(-1, per_cell).max(axis=1)
    hottest = max(int(cells.max(initial=0)), 1)
    return [float(cell) / hottest for cell in cells]


def draw(
    layers: Sequence[tuple[int, IntArray]], *, width: int, is_plain: bool, num_top: int = 3
) -> list[Text]:
    """A line per (layer_idx, counts) with its hottest experts; `is_plain` uses ASCII and no colour."""
    label_width = max((len(str(layer_idx)) for layer_idx, _ in layers), default=1)
    longest = max((len(_top(counts, num_top)) for _, counts in layers), default=0)
    room = max(8, width - label_width - len("layer  || ") - longest)
    lines = []
    for layer_idx, counts in layers:
        line = Text(f"layer {layer_idx:>{label_width}} |", no_wrap=True)
        cells = shades(counts, room)
        cell_width = 2 if 2 * len(cells) <= room else 1
        for shade in cells:
            if is_plain:
                line.append(ASCII_SHADES[_step(shade, len(ASCII_SHADES))] * cell_width)
            elif shade == 0:
                line.append(" " * cell_width)
            else:
                line.append(BLOCK * cell_width, style=_COLOURS[_step(shade, len(_COLOURS))])
        line.append(f"| {_top(counts, num_top)}")
        lines.append(line)
    return lines


def _step(shade: float, num: int) -> int:
    """0 only for 0: an expert that fired once is seen."""
    return 0 if shade == 0 else 1 + round(shade * (num - 2))


def _top(counts: IntArray, num: int) -> str:
    """The hottest experts and their shares, ties to the lowest id: `17 21%, 4 15%`."""
    total = int(counts.sum())
    order = np.argsort(-counts, kind="stable")[:num]
    return ", ".join(f"{i} {counts[i] / total:.0%}" for i in order.tolist() if counts[i]) if total else "none"
