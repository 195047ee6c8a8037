"""MXFP4 as checkpoints store it: 32 numbers of four bits under one power of two, decoded exactly.

    block    16 bytes; byte j holds number 2j in its low half and number 2j + 1 in its high half
    number   sign, two bits of exponent, one of mantissa (E2M1): 0 0.5 1 1.5 2 3 4 6, then the negatives
    scale    one byte s for 2^(s - 127) (E8M0); 255 is NaN

A number has two significant bits, so float32 and bfloat16 hold every product that does not overflow.

Source:  OCP Microscaling Formats (MX) Specification 1.0 (E2M1, E8M0, MXFP4); gpt-oss, arXiv:2508.10925.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moesaic.spec.mxfp4 import BLOCK

DECODE_BYTES = 6  # a float32, and half of an index
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _pairs() -> Tensor:
    """The two numbers of every byte [256, 2]."""
    numbers = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])
    byte = torch.arange(256)
    return torch.stack((numbers[byte & 15], numbers[byte >> 4]), dim=1)


def _powers() -> Tensor:
    """What every scale byte stands for [256]."""
    return torch.tensor([*(math.ldexp(1.0, byte - 127) for byte in range(255)), math.nan])


_PAIRS, _POWERS = _pairs(), _powers()


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers, float32: NaN or infinite only where a scale is NaN or a product overflows.

    Units:   holds DECODE_BYTES for each number, the 4 that are returned included.

    Shapes:  blocks [.., D / 32, 16] and scales [.., D / 32] uint8; returns [.., D].
    """
    numbers = _PAIRS.index_select(0, blocks.reshape(-1).int()).view(*scales.shape, BLOCK)
    powers = _POWERS.index_select(0, scales.reshape(-1).int()).view(*scales.shape, 1)
    return numbers.mul_(powers).flatten(-2)
