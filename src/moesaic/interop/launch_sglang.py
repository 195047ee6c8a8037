"""A deployment as SGLang's launch_server, and as KTransformers' fork of it: one line a node."""

from __future__ import annotations

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
    one_host_lacks,
    overlap_lack,
    places_lack,
    tier_lacks,
)

INIT_PORT = 20000
KV_DTYPES = {"fp8": ("fp8_e4m3",), "fp4": ("nvfp4", "fp4_e2m1")}
ONLINE = ("fp8",)
KT_METHODS = {"int4": "AMXINT4", "int8": "AMXINT8", "fp8": "FP8", "bfloat16": "BF16"}


def sglang_lacks(shape: Shape, inventory: Inventory, placement: PlacementWriter | None) -> list[Lack]:
    """What SGLang leaves out of an instance."""
    title, words = inventory.title, _words(inventory)
    found = common_lacks(shape, title)
    if placement is None:
        found += places_lack(shape, title, "--enable-eplb, which places experts by the load it counts itself")
    if shape.kvp > 1:
        found.append(
            Lack(
                path=f"{shape.path}.layout.attention.kvp", value=str(shape.kvp),
                reason=f"{title} has no Helix: KV and the projections around it are split over the same "
                "ranks",
                nearest=f"decode context parallel {shape.kvp} inside tensor parallel {shape.kvp * shape.tp}"
                if words.has("--dcp-size")
                else f"tensor parallel {shape.kvp * shape.tp}",
            )
        )  # fmt: skip
    if not words.has("--enable-two-batch-overlap"):
        found += overlap_lack(shape, title)
    if shape.weights is not None and shape.weights not in ONLINE:
        found.append(
            format_lack(
                shape, "weights", shape.weights, title, "a checkpoint that is stored in it, as --model"
            )
        )
    if shape.kv != "bfloat16" and _kv_dtype(words, shape) is None:
        found.append(
            format_lack(shape, "kv", shape.kv, title, "--kv-cache-dtype fp8_e4m3, or the model's own")
        )
    carried = {("kv", "host")} if words.has("--hicache-size") else set()
    return found + tier_lacks(shape, title, frozenset(carried))


def sglang_launches(
    shape: Shape,
    model: str,
    inventory: Inventory,
    port: int,
    nodes: list[Place],
    placement: str | None = None,
) -> tuple[list[Launch], dict[str, str]]:
    """One line for each node. `placement` is the text of the file for --init-expert-location."""
    files = {} if placement is None else {f"{shape.name}.experts.json": placement}
    launches = []
    for node, place in enumerate(nodes):
        words = _words(inventory)
        words.add("--model-path", model)
        _parallel(words, shape, place)
        _experts(words, shape, next(iter(files), None))
        _memory(words, shape)
        if shape.phase is not None:
            words.add("--disaggregation-mode", shape.phase)
            words.add("--disaggregation-transfer-backend", "nixl")
        words.add("--host", "0.0.0.0")
        words.add("--port", port)
        launches.append(
            Launch(
                instance=shape.name, node=node, num_nodes=shape.num_nodes, count=shape.count, env={},
                words=tuple(words.words),
            )
        )  # fmt: skip
    return launches, files


def _words(inventory: Inventory) -> Words:
    return Words(inventory, "python3", "-m", "sglang.launch_server", program="launch_server")


def _parallel(words: Words, shape: Shape, place: Place) -> None:
    words.add("--tp-size", shape.ranks)  # all ranks of a stage: groups of attention lie inside
    if shape.kvp > 1 and words.has("--dcp-size"):
        words.add("--dcp-size", shape.kvp)
    if shape.dp > 1 and words.has("--attn-dp-size"):
        words.add("--attn-dp-size", shape.dp)
    elif shape.dp > 1:
        words.add("--dp-size", shape.dp)
        words.add("--enable-dp-attention")
    if shape.pp > 1:
        words.add("--pp-size", shape.pp)
    if shape.num_nodes > 1:
        words.add("--nnodes", shape.num_nodes)
        words.add("--node-rank", place.rank)
        words.add("--dist-init-addr", f"{place.head}:{INIT_PORT}")


def _experts(words: Words, shape: Shape, placement: str | None) -> None:
    if shape.ep == 1:
        return
    words.add("--ep-size", shape.ep)
    sends = (
        shape.dp > 1 and shape.ep == shape.ranks and shape.dispatcher in ("exchange", "two_level", "remote")
    )
    balances = bool(shape.num_redundant) and placement is None
    if sends:
        if words.has("--moe-a2a-backend"):
            words.add("--moe-a2a-backend", "deepep")
        elif words.has("--enable-deepep-moe"):
            words.add("--enable-deepep-moe")
        words.add("--deepep-mode", _deepep_mode(shape, balances))
        if shape.dispatch in ("fp8", "bfloat16") and words.has("--deepep-dispatcher-output-dtype"):
            words.add(
                "--deepep-dispatcher-output-dtype", {"bfloat16": "bf16"}.get(shape.dispatch, shape.dispatch)
            )
    if shape.num_micro_batches > 1 and words.has("--enable-two-batch-overlap"):
        words.add("--enable-two-batch-overlap")
    if shape.num_redundant:
        words.add("--ep-num-redundant-experts", _redundant(shape))
    if placement is not None:
        words.add("--init-expert-location", placement)
    elif balances:
        words.add("--enable-eplb")


def _deepep_mode(shape: Shape, balances: bool) -> str:
    """The recorder of the balancer counts in one mode only, so that `auto` is out with it."""
    if shape.phase is not None:
        return "normal" if shape.phase == "prefill" else "low_latency"
    return "normal" if balances else "auto"


def _redundant(shape: Shape) -> int:
    return shape.num_redundant + -(shape.num_experts + shape.num_redundant) % shape.ep


def _kv_dtype(words: Words, shape: Shape) -> str | None:
    names = KV_DTYPES.get(shape.kv, ())
    return next((name for name in names if words.allows("--kv-cache-dtype", name)), None)


def _memory(words: Words, shape: Shape) -> None:
    if shape.weights in ONLINE:
        words.add("--quantization", shape.weights)
    kv = _kv_dtype(words, shape)
    if kv is not None:
        words.add("--kv-cache-dtype", kv)
    if shape.dtype == "float32":
        words.add("--dtype", "float32")
    for tier in shape.instance.tiers.kv:
        if tier.place == "host" and words.has("--hicache-size"):
            words.add("--enable-hierarchical-cache")
            words.add("--hicache-size", max(tier.budget_bytes // shape.num_devices // 10**9, 1))


# --- KTransformers


def kt_lacks(shape: Shape, inventory: Inventory, placement: PlacementWriter | None) -> list[Lack]:
    """What KTransformers leaves out of an instance: it is for one node with experts in host memory."""
    title, path = inventory.title, shape.path
    found = [
        *common_lacks(shape, title),
        *tier_lacks(shape, title, frozenset({("experts", "host")})),
    ]
    if placement is None:
        found += places_lack(shape, title, "--kt-expert-placement-strategy frequency with recorded counts")
    if not shape.instance.tiers.experts:
        found.append(
            Lack(
                path=f"{path}.tiers.experts", value="none",
                reason=f"{title} computes experts on the host's processors, and here all are on devices",
                nearest="--for sglang, of which it is a fork",
            )
        )  # fmt: skip
    for axis, size in (("dp", shape.dp), ("kvp", shape.kvp), ("pp", shape.pp), ("ep", shape.ep)):
        if size > 1:
            found.append(
                Lack(
                    path=f"{path}.layout.{axis}", value=str(size),
                    reason=f"{title} splits the part that stays on devices by tensor parallelism alone",
                    nearest=f"tensor parallel {shape.num_devices}",
                )
            )  # fmt: skip
    found += one_host_lacks(shape, title)
    if _kt_method(shape) is None:
        found.append(
            format_lack(
                shape, "weights", str(shape.weights or shape.stored), title, "int4, --kt-method AMXINT4"
            )
        )
    if shape.kv != "bfloat16" and _kv_dtype(_words(inventory), shape) is None:
        found.append(format_lack(shape, "kv", shape.kv, title, "the model's own"))
    return found


def kt_launches(
    shape: Shape,
    model: str,
    inventory: Inventory,
    port: int,
    nodes: list[Place],
    placement: str | None = None,
) -> tuple[list[Launch], dict[str, str]]:
    """One line: the host's processors, and how many experts of a layer stay on devices."""
    files = {} if placement is None else {f"{shape.name}.experts.json": placement}
    words = _words(inventory)
    words.add("--model-path", model)
    words.add("--tp-size", min(shape.num_devices, shape.devices_per_node))
    words.add("--kt-weight-path", "${KT_WEIGHTS:?folder of the weights that kt quant wrote}")
    words.add("--kt-method", _kt_method(shape) or KT_METHODS["int4"])
    words.add("--kt-cpuinfer", "${KT_CORES:?physical cores of the host}")
    words.add("--kt-threadpool-count", "${KT_NUMA_NODES:?NUMA nodes of the host}")
    words.add("--kt-num-gpu-experts", _resident(shape))
    if files:
        words.add("--init-expert-location", next(iter(files)))
        words.add("--kt-expert-placement-strategy", "frequency")
    _memory(words, shape)
    words.add("--host", "0.0.0.0")
    words.add("--port", port)
    launch = Launch(
        instance=shape.name, node=0, num_nodes=1, count=shape.count, env={}, words=tuple(words.words)
    )
    del nodes  # one host
    return [launch], files


def _kt_method(shape: Shape) -> str | None:
    """How the host's experts are stored: as planned, else as in the checkpoint; None: in no format it has."""
    stored = shape.weights or shape.stored
    return "${KT_METHOD:?how the host's experts are stored}" if stored is None else KT_METHODS.get(stored)


def _resident(shape: Shape) -> str:
    """Experts of a layer on devices. How many fit is not in the file: only that some are in host memory."""
    return f"${{KT_GPU_EXPERTS:?experts of a layer, below {shape.num_experts}, that the devices hold}}"
