"""Time of one operator on one device: the longer of computing and reading memory, and its launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moesaic.cost.profile import Kind, Launch, Profile
from moesaic.cost.term import CostTerm, Interval, Number, TermName
from moesaic.spec.hardware import Machine


def compute_dtype(weight_format: str, machine: Machine) -> str:
    """What products with weights of a format are computed in on a machine.

    4-bit floats need a device with such a rate; 8-bit ones too; narrower integers are unpacked to bfloat16,
    and that to float32 where a device has no rate for it.
    """
    wanted = {"nvfp4": "fp4", "mxfp4": "fp4", "fp8": "fp8", "int8": "int8", "float32": "float32"}
    dtype = wanted.get(weight_format, "bfloat16")
    return dtype if machine.has_rate(dtype) else machine.wide_dtype


def operator(
    name: TermName,
    *,
    flops: Number,
    num_bytes: Number,
    dtype: str,
    machine: Machine,
    profile: Profile,
    kind: Kind = "matrices",
    launches: Sequence[Launch] = (),
    rows: Number | None = None,
) -> CostTerm:
    """The term of one operator.

    Units:  flops and num_bytes are counts of one device; rows are those of each of its products, where they
            are few.
    """
    share: Number = profile.compute_share[kind]
    if rows is not None and profile.full_rate_rows:
        share = share * np.sqrt(np.minimum(rows / profile.full_rate_rows, 1.0))
    compute_s = flops / (np.maximum(share, 1e-9) * machine.flops_per_s(dtype))
    memory_s = num_bytes / (profile.memory_share[kind] * machine.memory_bytes_per_s)
    overhead_s = sum(profile.launch_s[launch] for launch in launches)
    seconds = _with_launches(compute_s, memory_s, overhead_s, profile)
    return CostTerm(
        name=name, resource="memory", seconds=spread(seconds, profile), flops=flops, bytes=num_bytes,
        source=profile.source, compute_s=compute_s, memory_s=memory_s, overhead_s=overhead_s,
    )  # fmt: skip


def joined(parts: Sequence[CostTerm], profile: Profile) -> CostTerm:
    """One operator instead of several: all their products beside all their reads. Named as the last."""
    compute_s, memory_s, overhead_s = (
        sum((getattr(part, name) for part in parts), 0.0) for name in ("compute_s", "memory_s", "overhead_s")
    )
    return replace(
        parts[-1], seconds=spread(np.maximum(compute_s, memory_s) + overhead_s, profile),
        flops=sum((part.flops for part in parts), 0.0), bytes=sum((part.bytes for part in parts), 0.0),
        compute_s=compute_s, memory_s=memory_s, overhead_s=overhead_s,
    )  # fmt: skip


def part_of(term: CostTerm, compute_share: Number, memory_share: Number, profile: Profile) -> CostTerm:
    """An operator that does a share of its products and of its reads, with the same launches."""
    compute_s, memory_s = term.compute_s * compute_share, term.memory_s * memory_share
    return replace(
        term, seconds=spread(_with_launches(compute_s, memory_s, term.overhead_s, profile), profile),
        flops=term.flops * compute_share, bytes=term.bytes * memory_share,
        compute_s=compute_s, memory_s=memory_s,
    )  # fmt: skip


def host(seconds: Number, profile: Profile) -> CostTerm:
    """Work of the host that the devices wait for."""
    return CostTerm(
        name="host",
        resource="overhead",
        seconds=spread(seconds, profile),
        overhead_s=seconds,
        source=profile.source,
    )


def spread(seconds: Number, profile: Profile) -> Interval:
    """Seconds with the profile's doubt."""
    return Interval.exactly(seconds).widened(profile.low, profile.high)


def _with_launches(compute_s: Number, memory_s: Number, overhead_s: Number, profile: Profile) -> Number:
    power, work_s = profile.launch_power, np.maximum(compute_s, memory_s)
    return work_s + overhead_s if power == 1 else (work_s**power + overhead_s**power) ** (1 / power)
