"""Random numbers by counter: a draw depends on (seed, position, attempt) and on nothing else.

So a request draws the same numbers alone, in any batch, chunked, after preemption and on a retried step.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_SIBLING_STREAM = 1  # second key word of derived seeds, so that they never meet a request's own draws


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 64-bit words: Philox4x64-10.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011, sec. 3.3.
    """
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = (right >> 64) ^ b ^ k0, right & _MASK, (left >> 64) ^ d ^ k1, left & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return a, b, c, d


def uniforms(seed: int, position: int, draw: int) -> tuple[float, ...]:
    """Four numbers in [0, 1), multiples of 2**-53: the `draw`-th quartet of this seed at this position."""
    words = philox((position, draw, 0, 0), (seed & _MASK, 0))
    return tuple((word >> 11) * 2.0**-53 for word in words)


def sibling_seed(seed: int, choice_idx: int) -> int:
    """The seed of the `choice_idx`-th of n choices for one prompt; choice 0 keeps the request's own."""
    if choice_idx == 0:
        return seed & _MASK
    return philox((choice_idx, 0, 0, 0), (seed & _MASK, _SIBLING_STREAM))[0]
