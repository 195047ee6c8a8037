"""A deployment as `trtllm-serve` with its options file. Its flags are known from documentation only."""

from __future__ import annotations

from typing import Any

from moesaic.interop.inventory import Inventory
from moesaic.interop.launch import (
    Lack,
    Launch,
    Place,
    PlacementWriter,
    Shape,
    Words,
    common_lacks,
    format_lack,
    overlap_lack,
    places_lack,
    tier_lacks,
)
from moesaic.interop.yaml_text import dump_yaml

KV_DTYPE = {"fp8": "fp8", "fp4": "nvfp4"}
HELIX_BLOCK = 32  # tokens; the KV cache has to have the same


def trtllm_lacks(shape: Shape, inventory: Inventory, placement: PlacementWriter | None) -> list[Lack]:
    """What TensorRT-LLM leaves out of an instance."""
    title, path = inventory.title, shape.path
    found = common_lacks(shape, title)
    if placement is None:
        found += places_lack(shape, title, "its online balancer, layer_updates_per_iter above 0")
    if shape.dp > 1 and shape.tp > 1:
        found.append(
            Lack(
                path=f"{path}.layout.attention", value=f"dp {shape.dp} x tp {shape.tp}",
                reason=f"{title} gives every rank its own sequences, or splits heads over all of them",
                nearest=f"attention data parallel over all {shape.ranks} ranks",
            )
        )  # fmt: skip
    found += overlap_lack(shape, title, "documents no switch for overlapping two batches")
    if shape.weights is not None:
        found.append(
            format_lack(
                shape, "weights", shape.weights, title, "a checkpoint that is stored in it, as --model"
            )
        )
    if shape.kv not in ("bfloat16", *KV_DTYPE):
        found.append(format_lack(shape, "kv", shape.kv, title, "fp8, or the model's own"))
    return found + tier_lacks(shape, title, frozenset({("kv", "host")}))


def trtllm_launches(
    shape: Shape,
    model: str,
    inventory: Inventory,
    port: int,
    nodes: list[Place],
    placement: str | None = None,
) -> tuple[list[Launch], dict[str, str]]:
    """One line: an MPI launcher starts it on every rank of every node."""
    name = f"{shape.name}.options.yaml"
    files = {} if placement is None else {f"{shape.name}.balancer.yaml": placement}
    options = _options(shape, next(iter(files), None))
    start = () if shape.num_nodes == 1 else ("mpirun", "-n", str(shape.num_devices), "trtllm-llmapi-launch")
    words = Words(inventory, *start, "trtllm-serve", model, program="serve")
    words.add("--host", "0.0.0.0")
    words.add("--port", port)
    words.add("--tp_size", shape.tp * shape.dp)
    if shape.kvp > 1:
        words.add("--cp_size", shape.kvp)
    if shape.pp > 1:
        words.add("--pp_size", shape.pp)
    if shape.ep > 1:
        words.add("--ep_size", shape.ep)
    if shape.num_nodes > 1:
        words.add("--gpus_per_node", shape.devices_per_node)
    if shape.phase is not None:
        words.add("--server_role", "CONTEXT" if shape.phase == "prefill" else "GENERATION")
    if options:
        words.add("--extra_llm_api_options", name)
        files[name] = dump_yaml(options)
    del nodes  # mpirun reaches them all
    launch = Launch(
        instance=shape.name, node=0, num_nodes=shape.num_nodes, count=shape.count, env={},
        words=tuple(words.words),
    )  # fmt: skip
    return [launch], files


def _options(shape: Shape, balancer: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    cache: dict[str, Any] = {}
    if shape.dp > 1:
        options["enable_attention_dp"] = True
    if balancer is not None:
        options["moe_config"] = {"load_balancer": balancer}
    elif shape.num_redundant:
        slots = shape.num_experts + shape.num_redundant
        slots += -slots % shape.ep
        options["moe_config"] = {"load_balancer": {"num_slots": slots, "layer_updates_per_iter": 1}}
    if shape.kvp > 1:
        options["context_parallel_size"] = shape.kvp
        options["cp_config"] = {"cp_type": "HELIX", "tokens_per_block": HELIX_BLOCK}
        cache["tokens_per_block"] = HELIX_BLOCK
    if shape.kv in KV_DTYPE:
        cache["dtype"] = KV_DTYPE[shape.kv]
    for tier in shape.instance.tiers.kv:
        if tier.place == "host":
            cache["host_cache_size"] = tier.budget_bytes
    if cache:
        options["kv_cache_config"] = cache
    if shape.phase is not None:
        options["cache_transceiver_config"] = {"backend": "DEFAULT"}
    if shape.dtype == "float32":
        options["dtype"] = "float32"
    return options
