"""Expert counts as pictures: what fired once is seen, what did not is blank, and wide layers are folded."""

import numpy as np
import pytest

from moesaic.cli.heat_map import ASCII_SHADES, draw, shades


def test_shades_are_relative_to_the_hottest():
    assert shades(np.array([0, 5, 10]), 10) == [0.0, 0.5, 1.0]
    assert shades(np.array([0, 0]), 10) == [0.0, 0.0]
    assert shades(np.array([1, 9, 0, 0, 4]), 3) == [1.0, 0.0, 4 / 9]


def test_plain_lines():
    lines = draw(
        [(0, np.array([1, 0, 999, 0])), (12, np.array([0, 0, 0, 0]))], width=40, is_plain=True, num_top=2
    )
    first, second = (line.plain for line in lines)
    faint = ASCII_SHADES[1]
    assert first == f"layer  0 |{faint}{faint}  @@  | 2 100%, 0 0%"
    assert second == "layer 12 |        | none"
    assert all(ord(char) < 128 for char in first + second)


@pytest.mark.parametrize("num_experts", [4, 64, 256, 384])
def test_lines_fit_the_terminal(num_experts):
    counts = np.random.default_rng(0).integers(0, 1000, size=num_experts)
    for is_plain in (True, False):
        (line,) = draw([(3, counts)], width=80, is_plain=is_plain)
        assert len(line.plain) <= 80
