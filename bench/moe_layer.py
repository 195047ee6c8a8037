"""Time of the routed experts of one layer in one native call, beside how fast this machine reads memory.

Weights of several layers, more than any cache holds, lie in huge pages and take turns; every call has
other random choices. Bytes are those of the distinct experts of a call, as the kernels count them. Between
the calls the same buffer is read from end to end by the same threads: that is the bandwidth of this run.

    python bench/moe_layer.py --threads 2
    python bench/moe_layer.py --shape qwen3 --format bfloat16 --batch 1 --json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from moesaic.audit.bench.report import describe_machine, describe_versions, load_average
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


def measure(shape: str, format: str, batch: int, level: str, num_threads: int, num_runs: int) -> dict:
    """Seconds of a layer and of a pass over all bytes, each the median of runs in turn."""
    spec = spec_of(shape)
    ops = choose(preset("portable", dtype="bfloat16", backend=f"native/{level}"), num_threads=num_threads)
    assert isinstance(ops, NativeOps)
    layers, buffer, why_not = make_layers(spec, format, ops, num_threads)
    read, _ = reader(buffer, num_threads)
    generator = torch.Generator().manual_seed(1)
    seconds, rates, read_rates = [], [], []
    calls = max(len(layers), 8)
    for run in range(num_runs + 1):
        inputs = []
        for _ in range(calls):
            scores = torch.rand((batch, spec.num_experts), generator=generator)
            experts = scores.topk(spec.experts_per_token, dim=-1).indices.sort(dim=-1).values
            x = torch.randn((batch, spec.row_width), generator=generator).to(torch.bfloat16)
            inputs.append((x, experts, torch.rand(experts.shape, generator=generator)))
        before = ops.moe_counts.weight_bytes
        start = time.perf_counter()
        for at, (x, experts, weights) in enumerate(inputs):
            layers[at % len(layers)](x, experts, weights)
        took = time.perf_counter() - start
        read_s = read()
        if run:  # the first warms up
            seconds.append(took / calls)
            rates.append((ops.moe_counts.weight_bytes - before) / took)
            read_rates.append(buffer.nbytes / read_s)
    return {
        "shape": shape,
        "format": format,
        "batch": batch,
        "threads": num_threads,
        "level": level,
        "layer_ms": 1e3 * median(seconds),
        "least_layer_ms": 1e3 * min(seconds),
        "bytes_per_s": median(rates),
        "read_bytes_per_s": median(read_rates),
        "share": median(rate / read for rate, read in zip(rates, read_rates, strict=True)),
        "best_share": max(rates) / max(read_rates),
        "huge_pages": why_not is None,
    }


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
        layer._kernels.moe(layer._native, *told)
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
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shapes = list(SHAPES) if args.shape == "all" else [args.shape]
    results = [
        measure(shape, format, batch, args.level, args.threads, args.runs)
        for shape in shapes
        for format in args.format or ["int4-g32", "int8-g32", "bfloat16"]
        for batch in args.batch or [1, 4, 16]
    ]
    machine, versions, load = describe_machine(), describe_versions(), load_average()
    python_us = measure_python(args.level)
    if args.json:
        told = {"machine": machine, "versions": versions, "load": load, "python_us": python_us}
        json.dump(told | {"results": results}, sys.stdout)
        return
    print(f"{machine}; {versions}; load {load:.1f}")
    print(f"Python of a layer's forward at batch 1, its driver counted: {python_us:.1f} us")
    print("shape  format      batch  ms/layer (least)   GB/s of weights   GB/s read   share (best)")
    for one in results:
        print(
            f"{one['shape']:6} {one['format']:10} {one['batch']:6} {one['layer_ms']:9.3f} "
            f"({one['least_layer_ms']:.3f}) {one['bytes_per_s'] / 1e9:15.1f} "
            f"{one['read_bytes_per_s'] / 1e9:12.1f} {one['share']:9.2f} ({one['best_share']:.2f})"
            + ("" if one["huge_pages"] else "  no huge pages")
        )


if __name__ == "__main__":
    main()
