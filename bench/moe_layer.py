"""Time of the routed experts of one layer in one native call, beside how fast this machine reads memory.

Weights of several layers, more than any cache holds, lie in huge pages and take turns; every call has
other random choices. Bytes are those of the distinct experts of a call, as the kernels count them. Between
the calls the same buffer is read from end to end by the same threads: that is the bandwidth of this run.

With --neighbour every run is done twice, alone and beside one other process in a compute loop.

    python bench/moe_layer.py --threads 2
    python bench/moe_layer.py --shape qwen3 --format bfloat16 --batch 1 --json
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from table import describe, spread

from moesaic.audit.bench.report import load_average
from moesaic.experts.blob import BlobLayout, pack_expert
from moesaic.experts.contract import Routing, Tag
from moesaic.experts.store import ExpertLoader
from moesaic.kernels import native
from moesaic.kernels.huge_pages import HUGE_BYTES
from moesaic.kernels.measure.memory import allocate, reader
from moesaic.kernels.native.moe import MoeLayer
from moesaic.kernels.native.ops import NativeOps
from moesaic.kernels.ops import choose
from moesaic.parallel.dispatch.fused import Fused
from moesaic.spec.model import GateSpec, MoeSpec
from moesaic.spec.numerics import preset
from moesaic.steps import drive

SHAPES = {  # experts, chosen, hidden, expert width
    "olmoe": (64, 8, 2048, 1024),
    "qwen3": (128, 8, 2048, 768),
}
COLUMNS = (
    "shape",
    "format",
    "batch",
    "us a layer",
    "GB/s of weights",
    "GB/s read",
    "% of the read bandwidth",
)
LEAST_BYTES = 512 * 2**20  # of all layers: sixteen times the last-level cache of this machine


def spec_of(shape: str) -> MoeSpec:
    """The layer of a model, SwiGLU without biases."""
    num_experts, num_chosen, hidden, inner = SHAPES[shape]
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=num_chosen,
        expert_width=inner,
        row_width=hidden,
        gate=GateSpec(score="softmax"),
        shared=None,
    )


def make_layers(
    spec: MoeSpec, format: str, ops: NativeOps, num_threads: int
) -> tuple[list[MoeLayer], np.ndarray, str | None]:
    """Layers whose experts are copies of one, each with bytes of its own; and why pages are not huge."""
    layout = BlobLayout.of(spec, format)
    generator = torch.Generator().manual_seed(0)
    parts = {
        part: torch.randn(place.shape, generator=generator) * place.shape[-1] ** -0.5
        for part, place in layout.places.items()
    }
    blob = pack_expert(layout, parts)
    layer_bytes = spec.num_experts * layout.num_bytes
    num_layers = max(2, -(-LEAST_BYTES // layer_bytes))
    num_bytes = -(-num_layers * layer_bytes // HUGE_BYTES) * HUGE_BYTES
    buffer, why_not = allocate(num_bytes, "huge", num_threads)
    blobs = torch.from_numpy(buffer)[: num_layers * layer_bytes].view(num_layers, spec.num_experts, -1)
    blobs.copy_(blob)
    slots = list(range(spec.num_experts))
    return (
        [
            ops.moe_layer(at, spec, [layout.weights(one) for one in layer], slots)
            for at, layer in enumerate(blobs)
        ],
        buffer,
        why_not,
    )


class Neighbour:
    """Another process in a compute loop, which runs only inside `at_work`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        self._process.send_signal(signal.SIGSTOP)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let it compute."""
        self._process.send_signal(signal.SIGCONT)
        time.sleep(0.05)  # it has a core by then
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def measure(
    shape: str,
    format: str,
    batch: int,
    level: str,
    num_threads: int,
    num_runs: int,
    neighbour: Neighbour | None,
) -> dict[str, Any]:
    """Seconds of a layer and of a pass over all bytes, by runs in turn."""
    spec = spec_of(shape)
    ops = choose(preset("portable", dtype="bfloat16", backend=f"native/{level}"), num_threads=num_threads)
    assert isinstance(ops, NativeOps)
    layers, buffer, why_not = make_layers(spec, format, ops, num_threads)
    read, _ = reader(buffer, num_threads)
    generator = torch.Generator().manual_seed(1)
    calls = max(len(layers), 8)
    found: dict[str, list[float]] = {name: [] for name in ("us", "rate", "read_rate", "share", "slower")}

    def run() -> float:
        for at, (x, experts, weights) in enumerate(inputs):
            layers[at % len(layers)](x, experts, weights)
        return time.perf_counter()

    for repetition in range(num_runs + 1):
        inputs = []
        for _ in range(calls):
            scores = torch.rand((batch, spec.num_experts), generator=generator)
            experts = scores.topk(spec.experts_per_token, dim=-1).indices.sort(dim=-1).values
            x = torch.randn((batch, spec.row_width), generator=generator).to(torch.bfloat16)
            inputs.append((x, experts, torch.rand(experts.shape, generator=generator)))
        before, start_s = ops.moe_counts.weight_bytes, time.perf_counter()
        took_s = run() - start_s
        rate = (ops.moe_counts.weight_bytes - before) / took_s
        read_rate = buffer.nbytes / read()
        if neighbour is not None:
            with neighbour.at_work():
                start_s = time.perf_counter()
                slower = (run() - start_s) / took_s
        if repetition:  # the first warms up
            found["us"].append(1e6 * took_s / calls)
            found["rate"].append(rate / 1e9)
            found["read_rate"].append(read_rate / 1e9)
            found["share"].append(100 * rate / read_rate)
            if neighbour is not None:
                found["slower"].append(slower)
    return {"shape": shape, "format": format, "batch": batch, "huge_pages": why_not is None, **found}


def measure_python(level: str) -> float:
    """Microseconds of a layer's forward at batch 1 beside the native call; the weights are tiny."""
    spec = replace(spec_of("olmoe"), num_experts=8, expert_width=16, row_width=16)
    numerics = preset("portable", dtype="bfloat16", backend=f"native/{level}")
    ops = choose(numerics, num_threads=1)
    assert isinstance(ops, NativeOps)
    loader = ExpertLoader(((0, spec),), numerics.formats)
    for part, place in BlobLayout.of(spec, "bfloat16").places.items():
        loader.put_stack(0, part, torch.zeros((8, *place.shape)))
    fused = Fused(0, spec, loader.finish(), ops)
    tag = Tag(epoch=0, plan_version=0, step_id=0, micro_batch=0, chunk=0, layer_idx=0)
    x, routing = (
        torch.zeros((1, 16), dtype=torch.bfloat16),
        Routing(experts_TK=torch.arange(8).unsqueeze(0), weights_TK=torch.ones(1, 8)),
    )
    y, experts, weights, layer = torch.empty_like(x), routing.experts_TK, routing.weights_TK, fused._layer
    told = (x.data_ptr(), 16, experts.data_ptr(), 8, weights.data_ptr(), 8, y.data_ptr(), 1, 60.0)
    whole, native_alone = [], []
    for _ in range(5000):
        start = time.perf_counter()
        drive([fused.forward(x, routing, tag, None)], 1.0)
        middle = time.perf_counter()
        layer._kernels.moe(layer.native, *told)
        whole.append(middle - start)
        native_alone.append(time.perf_counter() - middle)
    return 1e6 * (median(whole) - median(native_alone))


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--format", action="append", help="default: int4-g32, int8-g32, bfloat16")
    parser.add_argument("--batch", action="append", type=int, help="default: 1, 4, 16")
    parser.add_argument("--level", default=native.levels()[-1], choices=native.levels())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--neighbour", action="store_true", help="also beside another process that computes")
    parser.add_argument("--json", action="store_true", help="as scripts/performance.py reads it")
    args = parser.parse_args()
    shapes = list(SHAPES) if args.shape == "all" else [args.shape]
    load, neighbour = load_average(), Neighbour() if args.neighbour else None
    try:
        results = [
            measure(shape, format, batch, args.level, args.threads, args.runs, neighbour)
            for shape in shapes
            for format in args.format or ["int4-g32", "int8-g32", "bfloat16"]
            for batch in args.batch or [1, 4, 16]
        ]
    finally:
        if neighbour is not None:
            neighbour.end()
    figures = ["us", "rate", "read_rate", "share", *(["slower"] if args.neighbour else [])]
    columns = [*COLUMNS, *(["times slower beside a neighbour"] if args.neighbour else [])]
    rows = [
        [one["shape"], one["format"], one["batch"], *(spread(one[name]) for name in figures)]
        for one in results
    ]
    told = describe(
        f"The routed experts of one layer, {args.threads} threads",
        columns,
        rows,
        [
            f"Level {args.level}; load before {load:.1f}.",
            f"Python of a forward at batch 1, its driver counted: {measure_python(args.level):.1f} us.",
            *(() if all(one["huge_pages"] for one in results) else ("Pages were not huge.",)),
        ],
    )
    if args.json:
        json.dump(told, sys.stdout, indent=2)
        return
    print(f"{told['machine']}; {told['versions']}\n{' '.join(told['notes'])}")
    print("; ".join(columns))
    for shape, format, batch, *spreads in rows:
        cells = (f"{one['median']:9.2f} [{one['min']:.2f} .. {one['max']:.2f}]" for one in spreads)
        print(f"{shape:6} {format:10} {batch:3}  {'  '.join(cells)}")


if __name__ == "__main__":
    main()
