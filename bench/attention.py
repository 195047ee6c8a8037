"""Attention alone: decode of sequences at long contexts and prefill of 512, beside the reference and torch.

Decode goes round layers whose KV together exceeds the caches, and is stated as bytes of KV per second beside
the read bandwidth measured in the same run; torch's scaled_dot_product_attention gets contiguous keys and
values.
Every round measures each in turn; medians and ranges are of rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from table import describe, spread
from torch import Tensor
from torch.nn import functional as F

from moesaic.audit.bench.report import load_average
from moesaic.kernels.huge_pages import HUGE_BYTES
from moesaic.kernels.kv_format import pool_zeros
from moesaic.kernels.kv_view import KvPlaces, KvRow, KvView
from moesaic.kernels.measure.memory import allocate, reader
from moesaic.kernels.ops import Ops, choose, default_backend
from moesaic.spec.numerics import KV_FORMATS, KvFormat, kv_row_bytes, preset

BUFFER_BYTES = 128 * HUGE_BYTES
CACHE_BYTES = 128 * 2**20  # guess: more than the caches of a small machine
BLOCK = 16
Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of one attention; `value_width` where values are the first columns of the keys."""

    heads: int
    groups: int
    width: int
    value_width: int | None = None

    def bytes_per_token(self, format: KvFormat) -> int:
        """Of keys and values in one layer."""
        pools = 1 if self.value_width else 2
        return pools * self.groups * kv_row_bytes(format, self.width)


SHAPES = {
    "olmoe": Shape(heads=16, groups=16, width=128),
    "qwen3-30b": Shape(heads=32, groups=4, width=128),
    "mla": Shape(heads=16, groups=1, width=576, value_width=512),
}


class Case:
    """Layers of one shape whose pools are filled with `length` positions of each of some sequences."""

    def __init__(
        self, shape: Shape, format: KvFormat, length: int, num_layers: int, ops: Ops, num_sequences: int = 1
    ) -> None:
        self.shape, self.ops, self.num_sequences = shape, ops, num_sequences
        self.num_blocks = -(-length // BLOCK)
        pools = (num_sequences * self.num_blocks + 1, shape.groups, BLOCK, shape.width)
        self.layers = [
            (pool_zeros(pools, format), None if shape.value_width else pool_zeros(pools, format))
            for _ in range(num_layers)
        ]
        generator = torch.Generator().manual_seed(0)
        new = torch.randn((length, shape.groups, shape.width), generator=generator).bfloat16()
        for layer in range(num_layers):
            for sequence in range(num_sequences):
                view = self.view(layer, 0, length, (sequence,))
                ops.write_kv(view, new, None if shape.value_width else new)

    def view(self, layer: int, start: int, count: int, sequences: Sequence[int]) -> KvView:
        """Positions start .. start + count of some sequences in a layer."""
        rows = tuple(
            KvRow(
                first_row=i * count,
                num_tokens=count,
                start_idx=start,
                blocks=tuple(range(sequence * self.num_blocks, (sequence + 1) * self.num_blocks)),
            )
            for i, sequence in enumerate(sequences)
        )
        keys, values = self.layers[layer]
        return KvView(key_pool=keys, value_pool=values, places=KvPlaces.of(rows, BLOCK))

    def calls(self, start: int, count: int) -> list[Call]:
        """One call a layer, each with tables that were made before, as in a step."""
        sequences = range(self.num_sequences)
        views = [self.view(layer, start, count, sequences) for layer in range(len(self.layers))]
        shape, generator = self.shape, torch.Generator().manual_seed(1)
        rows = (self.num_sequences * count, shape.heads, shape.width)
        q_THC = torch.randn(rows, generator=generator).bfloat16()

        def call(view: KvView) -> Call:
            return lambda: self.ops.attention(
                q_THC, view, softmax_scale=shape.width**-0.5, value_width=shape.value_width
            )

        return [call(view) for view in views]


def torch_calls(shape: Shape, length: int, count: int, num_layers: int, num_sequences: int) -> list[Call]:
    """torch's own attention in bfloat16 over contiguous keys and values."""

    def draw(heads: int, rows: int, width: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn((num_sequences, heads, rows, width), generator=generator).bfloat16()

    q = draw(shape.heads, count, shape.width)

    def call(keys: Tensor, values: Tensor) -> Call:
        return lambda: F.scaled_dot_product_attention(
            q, keys, values, is_causal=count > 1, enable_gqa=shape.heads > shape.groups
        )

    layers = []
    for _ in range(num_layers):
        keys = draw(shape.groups, length, shape.width)
        values = (
            keys[..., : shape.value_width] if shape.value_width else draw(shape.groups, length, shape.width)
        )
        layers.append(call(keys, values))
    return layers


def seconds(calls: list[Call]) -> float:
    """Of one call, on average over a round of all."""
    began_s = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began_s) / len(calls)


def measure(
    shape: Shape,
    formats: list[KvFormat],
    context: int,
    count: int,
    num_sequences: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Each way's seconds a call, by rounds in turn; decode also as bytes of KV per second."""
    layer_bytes = num_sequences * context * shape.bytes_per_token("bfloat16")
    num_layers = 1 if count > 1 else max(1, -(-CACHE_BYTES // layer_bytes))
    ways: dict[str, tuple[list[Call], int]] = {}
    for format in formats:
        numerics = preset("portable", dtype="bfloat16", backend=arguments.backend, kv_format=format)
        ops = choose(numerics, num_threads=arguments.threads)
        case = Case(shape, format, context, num_layers, ops, num_sequences)
        format_bytes = num_sequences * context * shape.bytes_per_token(format)
        ways[format] = (case.calls(context - count, count), format_bytes)
    if "reference" not in arguments.skip:
        ops = choose(preset("portable", dtype="bfloat16"), num_threads=arguments.threads)
        case = Case(shape, "bfloat16", context, 1, ops, num_sequences)
        ways["reference"] = (case.calls(context - count, count), layer_bytes)
    if "torch" not in arguments.skip:
        calls = torch_calls(shape, context, count, num_layers, num_sequences)
        ways["torch sdpa"] = (calls, layer_bytes)
    buffer, _ = allocate(BUFFER_BYTES, "huge", arguments.threads)
    read, _ = reader(buffer, arguments.threads)
    times: dict[str, list[float]] = {name: [] for name in ways}
    rates: list[float] = []
    for calls, _ in ways.values():
        seconds(calls)
    for _ in range(arguments.rounds):
        began_s = time.perf_counter()
        read()
        rates.append(BUFFER_BYTES / (time.perf_counter() - began_s))
        for name, (calls, _) in ways.items():
            times[name].append(seconds(calls))
    found: dict[str, Any] = {"read_gb_per_s": spread([rate / 1e9 for rate in rates]), "ways": {}}
    for name, of_rounds in times.items():
        found["ways"][name] = {"us": spread([1e6 * second for second in of_rounds])}
        if count == 1:
            found["ways"][name]["kv_gb_per_s"] = spread(
                [ways[name][1] / second / 1e9 for second in of_rounds]
            )
    return found


def rows_of(what: str, found: dict[str, Any]) -> list[list[Any]]:
    """A row of the table for each way of a case."""
    read = found["read_gb_per_s"]
    return [
        [what, way, of_way["us"], *((of_way["kv_gb_per_s"], read) if "kv_gb_per_s" in of_way else ("", ""))]
        for way, of_way in found["ways"].items()
    ]


def main() -> None:
    """Print a line for each case and way, or all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default=default_backend())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", choices=KV_FORMATS, default=["bfloat16", "int8", "fp8"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 16384])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1], help="that decode together")
    parser.add_argument("--prefill", type=int, default=512, help="0: none")
    parser.add_argument("--skip", nargs="*", choices=["reference", "torch"], default=[])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    load, rows = load_average(), []
    steps = [(context, 1, batch) for batch in arguments.sequences for context in arguments.contexts]
    steps += [(arguments.prefill, arguments.prefill, 1)] if arguments.prefill else []
    for name in arguments.shapes:
        for context, count, batch in steps:
            what = f"{name} {'prefill' if count > 1 else 'decode'} {context}" + (
                f" x {batch}" if batch > 1 else ""
            )
            measured = measure(SHAPES[name], arguments.formats, context, count, batch, arguments)
            found = rows_of(what, measured)
            rows += found
            for _, way, *cells in () if arguments.json else found:
                texts = (f"{c['median']:10.1f} [{c['min']:.1f} .. {c['max']:.1f}]" for c in cells if c)
                print(f"{what:24s} {way:12s}{'  '.join(texts)}")
    if arguments.json:
        told = describe(
            f"Attention alone, {arguments.threads} threads",
            ["case", "way", "us a call", "GB/s of KV", "GB/s read"],
            rows,
            [f"Backend {arguments.backend}; load before {load:.1f}."],
        )
        print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
