"""A deployment as `llama-server`: one process on one node, experts of some layers in host memory."""

from __future__ import annotations

from moesaic.account.params import expert_weights
from moesaic.interop.inventory import Inventory
from moesaic.interop.launch import (
    Lack,
    Launch,
    PlacementWriter,
    Shape,
    Words,
    common_lacks,
    format_lack,
    one_host_lacks,
    places_lack,
    tier_lacks,
)
from moesaic.spec.model import ModelSpec

KV_TYPE = {"int8": "q8_0"}


def llamacpp_lacks(shape: Shape, inventory: Inventory, placement: PlacementWriter | None) -> list[Lack]:
    """What llama.cpp leaves out of an instance."""
    del placement  # experts are kept by layers, not one by one
    title, path = inventory.title, shape.path
    found = [
        *common_lacks(shape, title),
        *places_lack(shape, title, "whole layers' experts in host memory, --n-cpu-moe"),
        *tier_lacks(shape, title, frozenset({("experts", "host")})),
    ]
    layouts = (
        ("layout.attention.dp", shape.dp, "several servers behind a router"),
        ("layout.attention.kvp", shape.kvp, "layers over devices, --split-mode layer"),
        ("layout.experts.ep", shape.ep, "layers over devices, --split-mode layer"),
    )
    for name, size, instead in layouts:
        if size > 1:
            found.append(
                Lack(
                    path=f"{path}.{name}", value=str(size),
                    reason=f"{title} splits layers or rows of matrices over the devices of one node",
                    nearest=instead,
                )
            )  # fmt: skip
    found += one_host_lacks(shape, title)
    if shape.weights is not None:
        found.append(
            format_lack(shape, "weights", shape.weights, title, "a GGUF file of that size, as --model")
        )
    if shape.kv not in ("bfloat16", *KV_TYPE):
        found.append(format_lack(shape, "kv", shape.kv, title, "q8_0, 8 bits with a scale for 32"))
    return found


def llamacpp_launches(
    shape: Shape, model: str, inventory: Inventory, port: int, spec: ModelSpec | None
) -> tuple[list[Launch], dict[str, str]]:
    """One line, and no files."""
    words = Words(inventory, "llama-server", program="server")
    words.add("--model", model if model.endswith(".gguf") else f"${{GGUF:?{model} as a GGUF file}}")
    words.add("--gpu-layers", 999)
    if shape.num_devices > 1:
        rows = "tensor" if words.allows("--split-mode", "tensor") else "row"
        words.add("--split-mode", rows if shape.tp > 1 else "layer")
    host = next((t for t in shape.instance.tiers.experts if t.place == "host"), None)
    if host is not None:
        layers = None if spec is None else _host_layers(spec, host.budget_bytes)
        if layers is None:
            words.add("--cpu-moe")
        elif layers:
            words.add("--n-cpu-moe", layers)
    if shape.kv in KV_TYPE:
        words.add("--cache-type-k", KV_TYPE[shape.kv])
        words.add("--cache-type-v", KV_TYPE[shape.kv])
    words.add("--host", "0.0.0.0")
    words.add("--port", port)
    launch = Launch(
        instance=shape.name, node=0, num_nodes=1, count=shape.count, env={}, words=tuple(words.words)
    )
    return [launch], {}


def _host_layers(spec: ModelSpec, budget_bytes: int) -> int | None:
    """First layers whose experts a budget of host memory holds; None when it holds all of them.

    --n-cpu-moe counts layers from the first, dense ones too.
    """
    bits = spec.stored_format("routed_experts").bits
    left = float(budget_bytes)
    for layer_idx, moe in spec.moe_layers:
        left -= moe.num_experts * expert_weights(moe) * bits / 8
        if left < 0:
            return layer_idx
    return None
