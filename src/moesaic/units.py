"""Sizes, times and rates for people: SI in the code, readable text at the edge."""

from __future__ import annotations

import re

from moesaic.errors import ConfigError

_BYTE_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Bytes from `512MiB`, `2GB`, `1.5g` or a plain number.

    Units:  decimal for k/M/G/T and kB/MB/GB/TB, binary for KiB/MiB/GiB/TiB.
    Raises: ConfigError for anything else, and for zero or less.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = _BYTE_UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{text!r} is not a size: write a number with B, kB, MB, GB, KiB, MiB or GiB, as in 512MiB"
        )
    size = int(float(match.group(1)) * unit)
    if size <= 0:
        raise ConfigError(f"a size must be above zero, got {text!r}")
    return size


def format_bytes(size: float) -> str:
    """`format_bytes(70272)` is `70.3 kB`: decimal units, three digits."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if abs(size) >= unit:
            return f"{_three_digits(size / unit)} {name}"
    return f"{size:.0f} B"


def format_count(count: float) -> str:
    """`format_count(671_026_419_200)` is `671.03B`: the way model sizes are written."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if abs(count) >= unit:
            return f"{count / unit:.2f}{name}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """`format_seconds(0.0123)` is `12.3 ms`."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= unit:
            return f"{_three_digits(seconds / unit)} {name}"
    return f"{seconds * 1e9:.0f} ns"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
