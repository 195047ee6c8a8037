"""The launch lines of a deployment for one engine, checked against the flags of its release."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from moesaic.interop.divisibility import problems
from moesaic.interop.inventory import Inventory, choose, versions
from moesaic.interop.launch import (
    Emission,
    Lack,
    Launch,
    Place,
    PlacementWriter,
    Shape,
    can_be_placed,
    is_default_plan,
    places,
    shapes_of,
)
from moesaic.interop.launch_llamacpp import llamacpp_lacks, llamacpp_launches
from moesaic.interop.launch_sglang import kt_lacks, kt_launches, sglang_lacks, sglang_launches
from moesaic.interop.launch_trtllm import trtllm_lacks, trtllm_launches
from moesaic.interop.launch_vllm import vllm_lacks, vllm_launches
from moesaic.interop.manifest import HEAD, IMAGES, RANK, manifest
from moesaic.spec.deployment import Deployment, LoadAffinity, PrefixAffinity
from moesaic.spec.model import ModelSpec

PORT = 8000
MANIFEST = "manifest.yaml"

LACKS: Mapping[str, Callable[[Shape, Inventory, PlacementWriter | None], list[Lack]]] = {
    "vllm": vllm_lacks, "sglang": sglang_lacks, "trtllm": trtllm_lacks, "llamacpp": llamacpp_lacks,
    "kt": kt_lacks,
}  # fmt: skip


def emit(
    deployment: Deployment,
    engine: str,
    *,
    model: str,
    spec: ModelSpec | None = None,
    version: str | None = None,
    devices_per_node: int | None = None,
    placement: PlacementWriter | None = None,
    image: str | None = None,
    with_manifest: bool = False,
) -> Emission:
    """How to start a deployment in an engine, and everything of it that the engine leaves out.

    `spec` are the facts of `model`, where they are known; `placement` writes the engine's expert placement
    file (None: the plan's places are named as left out). What is left out is in `lacks`: the lines are then
    the nearest that the engine can do.

    Raises: ConfigError for an unknown engine or version, and for a layout that no line of the engine can say.
    """
    inventory = choose(engine, version)
    launches: list[Launch] = []
    lacks: list[Lack] = []
    files: dict[str, str] = {}
    pairs: list[tuple[Launch, Launch | None, int]] = []
    shapes = shapes_of(deployment, spec, devices_per_node)
    for shape in shapes:
        write = placement if can_be_placed(shape) else None
        text = _placement(shape, write, spec)
        lacks += LACKS[engine](shape, inventory, write)
        lacks += _divisions(shape, spec, engine)
        made, more = _launches(shape, model, inventory, places(shape), text, spec)
        launches += made
        files |= more
        missing = _manifest_lack(shape, inventory) if with_manifest else None
        if missing is not None:
            lacks.append(missing)
        elif with_manifest:
            pairs.append(_pair(shape, model, inventory, text, spec))
    if pairs and len(pairs) == len(shapes):
        used = image or IMAGES[engine].format(version=inventory.version)
        files[MANIFEST] = manifest(pairs, files, image=used, port=PORT)
    return Emission(
        engine=engine, version=inventory.version, basis=inventory.basis, model=model,
        launches=tuple(launches), files=files, lacks=tuple(dict.fromkeys(lacks)),
        notes=(
            *_version_notes(inventory, version), *_notes(deployment, shapes, inventory, spec),
            *_buffer_notes(launches),
        ),
    )  # fmt: skip


def _placement(shape: Shape, write: PlacementWriter | None, spec: ModelSpec | None) -> str | None:
    if write is None or not shape.num_experts or shape.ep == 1 or is_default_plan(shape):
        return None
    return write(shape.instance.plan, spec)


def _launches(
    shape: Shape,
    model: str,
    inventory: Inventory,
    nodes: list[Place],
    placement: str | None,
    spec: ModelSpec | None,
) -> tuple[list[Launch], dict[str, str]]:
    if inventory.engine == "vllm":
        return vllm_launches(shape, model, inventory, PORT, nodes)
    if inventory.engine == "llamacpp":
        return llamacpp_launches(shape, model, inventory, PORT, spec)
    make = {"sglang": sglang_launches, "trtllm": trtllm_launches, "kt": kt_launches}[inventory.engine]
    return make(shape, model, inventory, PORT, nodes, placement)


def _manifest_lack(shape: Shape, inventory: Inventory) -> Lack | None:
    """Why an instance has no LeaderWorkerSet; None where it has one."""
    if inventory.engine not in IMAGES:
        reason = f"{inventory.title} has no manifest: a LeaderWorkerSet is for {', '.join(sorted(IMAGES))}"
    elif inventory.engine == "trtllm" and shape.num_nodes > 1:
        reason = (
            f"mpirun reaches the {shape.num_nodes} nodes over ssh, which a LeaderWorkerSet does not offer"
        )
    else:
        return None
    return Lack(path=shape.path, value="--kubernetes", reason=reason, nearest="the lines without a manifest")


def _pair(
    shape: Shape, model: str, inventory: Inventory, placement: str | None, spec: ModelSpec | None
) -> tuple[Launch, Launch | None, int]:
    """The lines of the leader's and the workers' pods, whose places are variables."""
    nodes = [Place(head=HEAD, rank="0", is_head=True)]
    if shape.num_nodes > 1:
        nodes.append(Place(head=HEAD, rank=RANK, is_head=False))
    made, _ = _launches(shape, model, inventory, nodes, placement, spec)
    leader = replace(made[0], num_nodes=shape.num_nodes)
    return leader, made[1] if len(made) > 1 else None, shape.devices_per_node


def _divisions(shape: Shape, spec: ModelSpec | None, engine: str) -> list[Lack]:
    """Divisions that the model does not allow in the engine: it would refuse to start."""
    if spec is None or engine == "llamacpp":
        return []
    tp = shape.tp * shape.kvp if engine in ("vllm", "sglang") else shape.tp
    return [
        Lack(path=f"{shape.path}.layout", value=one.rule, reason=one.message, nearest=one.suggestion)
        for one in problems(spec, tp=tp, expert_tp=shape.expert_tp)
    ]


def _version_notes(inventory: Inventory, asked: str | None) -> list[str]:
    if asked is None or asked.removeprefix("v") == inventory.version:
        return []
    there = ", ".join(versions(inventory.engine))
    return [
        f"the flags of {asked} are not known; these lines are checked against {inventory.version} "
        f"(known: {there})"
    ]


def _notes(
    deployment: Deployment, shapes: tuple[Shape, ...], inventory: Inventory, spec: ModelSpec | None
) -> list[str]:
    title = inventory.title
    notes = [f"{title} adds up in its own order: answers are close to the plan's numerics, not bit-identical"]
    named = {shape.stored for shape in shapes} - {None}
    if spec is None and named:
        notes.append(f"the checkpoint is taken to store its weights in {', '.join(sorted(map(str, named)))}")
    if inventory.basis == "documented":
        notes.append(f"the flags of {title} are from its documentation; its parser was not read")
    if any(shape.phase is not None for shape in shapes):
        notes.append("prefill and decode need a router in front that sends each request to one of either")
    elif any(shape.count > 1 for shape in shapes) or len(shapes) > 1:
        policy = deployment.route
        by = "prefix" if isinstance(policy, PrefixAffinity) else "prefix and load"
        how = f"by {by}" if isinstance(policy, PrefixAffinity | LoadAffinity) else "in turn"
        notes.append(f"several instances need a router in front, which spreads requests {how}")
    if any(shape.num_redundant and inventory.engine == "vllm" for shape in shapes):
        notes.append("vLLM's balancer moves experts by the load it counts; copies start in its own order")
    return notes


def _buffer_notes(launches: list[Launch]) -> list[str]:
    """What the low-latency exchange needs, where a line has it."""
    modes = [
        launch.words[idx + 1]
        for launch in launches
        for idx, word in enumerate(launch.words)
        if word == "--deepep-mode"
    ]
    if not set(modes) & {"auto", "low_latency"}:
        return []
    return [
        "DeepEP's low-latency buffer holds SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=128 tokens: set "
        "it to the most requests that a rank decodes at once"
    ]
