"""A deployment as `vllm serve`: one line a node."""

from __future__ import annotations

import json

from moesaic.errors import ConfigError
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

RPC_PORT = 13345
KV_DTYPE = {"fp8": "fp8", "fp4": "nvfp4"}
ONLINE = ("fp8",)  # weight formats that are made from a checkpoint while it is read


def vllm_lacks(shape: Shape, inventory: Inventory, placement: PlacementWriter | None) -> list[Lack]:
    """What vLLM leaves out of an instance."""
    del placement  # vLLM reads no placement file
    title, words = inventory.title, Words(inventory)
    found = common_lacks(shape, title)
    balancer = "--enable-eplb, which places experts by the load it counts itself"
    found += places_lack(shape, title, balancer)
    if shape.kvp > 1:
        found.append(
            Lack(
                path=f"{shape.path}.layout.attention.kvp", value=str(shape.kvp),
                reason=f"{title} has no Helix: KV and the projections around it are split over the same "
                "ranks",
                nearest=f"decode context parallel {shape.kvp} inside tensor parallel {shape.kvp * shape.tp}",
            )
        )  # fmt: skip
    if shape.ep > 1 and shape.expert_tp > 1:
        found.append(
            Lack(
                path=f"{shape.path}.layout.experts", value=f"ep {shape.ep} x tp {shape.expert_tp}",
                reason=f"{title} spreads whole experts over all ranks, or slices every one over all",
                nearest=f"expert parallel over all {shape.ranks} ranks",
            )
        )  # fmt: skip
    if not (_sends_rows(shape) and words.has("--enable-dbo")):
        reason = "overlaps two batches only where DeepEP sends rows between replicas"
        found += overlap_lack(shape, title, reason if words.has("--enable-dbo") else "has no --enable-dbo")
    found += _format_lacks(shape, words, title)
    carried = {("experts", "host")} if words.has("--cpu-offload-params") else set()
    carried |= {("kv", "host")} if words.has("--kv-offloading-size") else set()
    return found + tier_lacks(shape, title, frozenset(carried))


def _format_lacks(shape: Shape, words: Words, title: str) -> list[Lack]:
    found = []
    if shape.weights is not None and shape.weights not in ONLINE:
        found.append(
            format_lack(
                shape, "weights", shape.weights, title, "a checkpoint that is stored in it, as --model"
            )
        )
    kv = KV_DTYPE.get(shape.kv)
    if shape.kv != "bfloat16" and (kv is None or not words.allows("--kv-cache-dtype", kv)):
        found.append(format_lack(shape, "kv", shape.kv, title, "--kv-cache-dtype fp8, or the model's own"))
    return found


def _sends_rows(shape: Shape) -> bool:
    return shape.ep > 1 and shape.dp > 1 and shape.dispatcher in ("exchange", "two_level", "remote")


def vllm_launches(
    shape: Shape, model: str, inventory: Inventory, port: int, nodes: list[Place]
) -> tuple[list[Launch], dict[str, str]]:
    """One line for each node, and no files.

    Raises: ConfigError for a replica of attention that spans nodes beside other replicas.
    """
    replica = shape.tp * shape.kvp * shape.pp
    if shape.dp > 1 and replica > shape.devices_per_node:
        raise ConfigError(
            f"{shape.path}: a replica of {replica} devices spans nodes of {shape.devices_per_node}, and the "
            f"{shape.dp} replicas of a vLLM instance lie each inside one; plan with tp x pp of at most "
            f"{shape.devices_per_node}, or with dp 1"
        )
    launches = []
    for node, place in enumerate(nodes):
        words = Words(inventory, "vllm", "serve", model)
        _parallel(words, shape, place)
        _experts(words, shape)
        _memory(words, shape)
        if shape.phase is not None:
            transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
            words.add("--kv-transfer-config", json.dumps(transfer, separators=(",", ":")))
        if place.is_head:
            words.add("--host", "0.0.0.0")
            words.add("--port", port)
        env = {} if shape.phase is None else {"VLLM_NIXL_SIDE_CHANNEL_HOST": _own_address(place)}
        launches.append(
            Launch(
                instance=shape.name, node=node, num_nodes=shape.num_nodes, count=shape.count, env=env,
                words=tuple(words.words),
            )
        )  # fmt: skip
    return launches, {}


def _own_address(place: Place) -> str:
    return "${NODE:?address of this node}" if "HEAD" in place.head else "$POD_IP"


def _parallel(words: Words, shape: Shape, place: Place) -> None:
    tp = shape.tp * shape.kvp
    words.add("--tensor-parallel-size", tp)
    if shape.kvp > 1 and words.has("--decode-context-parallel-size"):
        words.add("--decode-context-parallel-size", shape.kvp)
    if shape.pp > 1:
        words.add("--pipeline-parallel-size", shape.pp)
    if shape.dp > 1:
        local = shape.devices_per_node // (tp * shape.pp)
        words.add("--data-parallel-size", shape.dp)
        if shape.num_nodes > 1:
            words.add("--data-parallel-size-local", local)
            words.add("--data-parallel-address", place.head)
            words.add("--data-parallel-rpc-port", RPC_PORT)
            if not place.is_head:
                words.add("--data-parallel-start-rank", place.times(local))
                words.add("--headless")
    elif shape.num_nodes > 1:
        _across_nodes(words, shape, place)


def _across_nodes(words: Words, shape: Shape, place: Place) -> None:
    if not words.has("--nnodes"):
        words.add("--distributed-executor-backend", "ray")
        return
    words.add("--nnodes", shape.num_nodes)
    words.add("--node-rank", place.rank)
    words.add("--master-addr", place.head)
    if not place.is_head:
        words.add("--headless")


def _experts(words: Words, shape: Shape) -> None:
    if shape.ep > 1:
        words.add("--enable-expert-parallel")
        if _sends_rows(shape) and words.has("--all2all-backend"):
            is_prefill = shape.phase == "prefill"
            words.add("--all2all-backend", f"deepep_{'high_throughput' if is_prefill else 'low_latency'}")
            if shape.num_micro_batches > 1 and words.has("--enable-dbo"):
                words.add("--enable-dbo")
        if shape.num_redundant:
            words.add("--enable-eplb")
            config = {"num_redundant_experts": _redundant(shape)}
            words.add("--eplb-config", json.dumps(config, separators=(",", ":")))


def _redundant(shape: Shape) -> int:
    """Redundant experts that make every rank hold as many as the next, at least as many as planned."""
    return shape.num_redundant + -(shape.num_experts + shape.num_redundant) % shape.ranks


def _memory(words: Words, shape: Shape) -> None:
    if shape.weights in ONLINE:
        words.add("--quantization", shape.weights)
    kv = KV_DTYPE.get(shape.kv)
    if kv is not None and words.allows("--kv-cache-dtype", kv):
        words.add("--kv-cache-dtype", kv)
    if shape.dtype == "float32":
        words.add("--dtype", "float32")
    gib = 2**30
    for tier in shape.instance.tiers.experts:
        if tier.place == "host" and words.has("--cpu-offload-params"):
            words.add("--cpu-offload-gb", f"{tier.budget_bytes / shape.num_devices / gib:.1f}")
            words.add("--cpu-offload-params", "experts")
    for blocks in shape.instance.tiers.kv:
        if blocks.place == "host" and words.has("--kv-offloading-size"):
            words.add("--kv-offloading-size", f"{blocks.budget_bytes / gib:.1f}")
