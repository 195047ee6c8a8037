"""Factors of queries: a function of the position alone, with the bits of a table in float64."""

from __future__ import annotations

import math

import torch

from moesaic.kernels.matmul import noise
from moesaic.layers.temperature import Temperature
from moesaic.spec.model import TemperatureSpec

SPEC = TemperatureSpec(scale=0.5, interval=16)


def test_factors_are_those_of_the_formula() -> None:
    positions_T = torch.arange(400)
    found = Temperature(SPEC).scale(torch.ones(400, 2, 3), positions_T)
    expected = torch.tensor([1 + 0.5 * math.log1p((position + 1) // 16) for position in range(400)])
    assert torch.equal(found, expected[:, None, None].expand(400, 2, 3))
    assert found[14].eq(1).all()
    assert found[15].gt(1).all()


def test_a_rows_bits_follow_its_position_alone() -> None:
    q_THC, positions_T = noise((90, 2, 8)), torch.arange(90) * 7
    whole = Temperature(SPEC).scale(q_THC, positions_T)
    grown = Temperature(SPEC)
    for rows in (slice(3, 4), slice(80, 90), slice(0, 90), slice(5, 5)):
        assert torch.equal(grown.scale(q_THC[rows], positions_T[rows]), whole[rows])


def test_narrow_queries_are_rounded_once() -> None:
    q_THC = noise((30, 2, 8), torch.bfloat16)
    found = Temperature(SPEC).scale(q_THC, torch.arange(30))
    assert torch.equal(found, Temperature(SPEC).scale(q_THC.float(), torch.arange(30)).bfloat16())
