"""From a folder to a model that runs: spec, numerics, ops, weights streamed into their places, and the proof.

The only file of the room that knows all the others. Families differ by their `WeightMap` and their spec
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from moesaic.errors import UnsupportedModelError, nearest
from moesaic.experts.contract import ExpertSide, RoutedExperts, SparseHalf, TokenSide
from moesaic.experts.ffn import LoopFfn
from moesaic.experts.router import Router
from moesaic.experts.store import ExpertLoader, ResidentStore, arena_runs, held_experts
from moesaic.hashing import digest
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.invariance import InvarianceProof
from moesaic.kernels.native.ops import NativeOps
from moesaic.kernels.ops import Ops, choose, default_backend
from moesaic.layers.attention import FusedGqa, GqaAttention, HeadShare, PagedAttend
from moesaic.layers.delta import GatedDelta
from moesaic.layers.mla import MlaAttention
from moesaic.layers.norm import LayerNorm, RmsNorm
from moesaic.layers.rope import RopeTable
from moesaic.models.accounting import Accounting, account
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.decoder import Decoder, DecoderLayer, FfnHalf, Head, Mixer, MixerHalf
from moesaic.models.dense_block import DenseBlock
from moesaic.models.families import FAMILIES
from moesaic.models.home import Home, Rooms, identity
from moesaic.models.moe_block import BranchNorms, Dense, MoeBlock, Norm
from moesaic.models.names import WeightMap
from moesaic.models.room import Room
from moesaic.models.weights import (
    Held,
    Progress,
    Reading,
    Weights,
    check_memory,
    decoding_note,
    matmul_shapes,
    read_experts,
    read_rest,
    rest_bytes_of,
    router_shapes,
    slice_shapes,
    split_shapes,
    weight_bytes_of,
    widened_bytes_of,
)
from moesaic.parallel.dispatch.fused import Fused
from moesaic.parallel.dispatch.fused_ranks import FusedLayer, FusedRanks
from moesaic.parallel.dispatch.local import Local
from moesaic.parallel.dispatch.staged import Staged
from moesaic.parallel.meter import Meter
from moesaic.parallel.moves import Follower, Placed
from moesaic.parallel.tensor import SplitRows, TensorRanks, TreeSum
from moesaic.parallel.transport import Traffic, Transport
from moesaic.spec.experts import ExpertPlan, contiguous_plan
from moesaic.spec.families import RUNNABLE_TYPES, read_config
from moesaic.spec.locate import locate_folder
from moesaic.spec.model import (
    DenseSpec,
    GqaSpec,
    LayerSpec,
    LinearSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    RopeSpec,
)
from moesaic.spec.numerics import DType, Format, KvFormat, Numerics, WireFormat
from moesaic.spec.numerics import preset as numerics_of
from moesaic.spec.tensor_split import TensorSplit, check_leaves, check_slices

LATENT_NORM_EPS = 1e-6
"""Of the norms inside latent attention, whatever the model's own is.
Source: DeepSeek-V3's reference code builds them with its default, and so does transformers 5."""


class Dispatcher(TokenSide, ExpertSide, Follower, Protocol):
    """Both sides of one rank that has tokens and experts."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Share:
    """What one rank of several holds, and how it reaches the others; `traffic` counts its dispatcher's bytes.

    `dispatcher` is made when the model's spec, its numerics and `ResidentStore.down_biases` are known. Over
    `moves` experts travel when the plan changes; None: it never does.
    """

    rank: int
    plan: ExpertPlan
    dispatcher: Callable[[ModelSpec, Numerics, Mapping[int, Tensor]], Dispatcher | FusedRanks]
    moves: Transport | None = None
    traffic: Traffic | None = None
    tensor: TensorShare | None = None  # None: all matrices but the experts are whole here


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorShare:
    """What a rank holds of the matrices of its replica, and how it adds and gathers with the others."""

    split: TensorSplit
    ranks: TensorRanks
    has_own_rows: bool = False  # replicas have rows of their own, of which each rank sends a part to experts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedModel:
    """A model in memory and everything that says what it is."""

    spec: ModelSpec
    numerics: Numerics
    ops: Ops
    decoder: Decoder
    placed: Placed | None  # the routed experts; None: a dense model
    meter: Meter
    traffic: Traffic | None  # with other ranks; None: there are none
    weight_bytes: int  # in memory, in the numerics' formats
    accounting: Accounting
    notes: tuple[str, ...]  # what loading did that the folder does not show
    lacks: tuple[str, ...]  # what was wished of its memory and is not so
    tensor_digests: Mapping[str, str]  # by key, of all that this rank read
    local_spec: ModelSpec  # with this rank's heads alone: what its KV pool is made for
    proof: InvarianceProof

    @property
    def store(self) -> ResidentStore | None:
        """Where the routed experts of this rank are."""
        return None if self.placed is None else self.placed.store

    @property
    def unused_tensors(self) -> tuple[Mapping[str, Any], ...]:
        """What the checkpoint has and nothing reads, as plain values."""
        return tuple(
            {"name": tensor.key, "bytes": tensor.num_bytes, "reason": tensor.reason}
            for tensor in self.accounting.unused
        )

    @property
    def model_digest(self) -> str:
        """Identity of the spec and of every byte that was read."""
        return model_digest(self.spec, self.tensor_digests)


def model_digest(spec: ModelSpec, tensor_digests: Mapping[str, str]) -> str:
    """Identity of a model: its spec, and its tensors by key; of several ranks, what all have read."""
    return digest([digest(spec), sorted(tensor_digests.items())])


def load(  # noqa: PLR0913 - each is a wish of its own
    path: str | Path,
    *,
    num_threads: int,
    preset: str = "portable",
    dtype: DType | None = None,
    format: Format | None = None,
    kv_format: KvFormat | None = None,
    wire_format: WireFormat | None = None,
    matmul_shards: int | None = None,
    backend: str | None = None,
    available_bytes: int | None = None,
    home: Home | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Read config.json and the weights beside it.

    `dtype` None is the checkpoint's own (float32 for float16, which it holds exactly). `format` is of the
    weights, `kv_format` of keys and values, `wire_format` of rows on their way to experts; None: that dtype.
    `matmul_shards` None are the preset's; `backend` None is the fastest here. `home` None: memory of this
    process alone.

    Units:  available_bytes is what the weights may take of this machine's memory; None: not checked.
    Raises: ConfigError for the config; UnsupportedModelError naming what the engine lacks; CheckpointError
            for the weights; HostMemoryShort before any weight is read; KernelUnavailable when the proof
            fails.
    """
    checkpoint = Checkpoint.open(path)
    spec = read_spec(path)
    numerics = numerics_of(
        preset,
        dtype=dtype or spec.dtype,
        backend=backend or default_backend(),
        format=format,
        kv_format=kv_format,
        wire_format=wire_format,
        matmul_shards=matmul_shards,
    )
    return build(
        checkpoint,
        spec,
        numerics,
        num_threads=num_threads,
        available_bytes=available_bytes,
        home=home,
        progress=progress,
    )


def read_spec(path: str | Path) -> ModelSpec:
    """The spec that a folder's config.json describes; no weights.

    Raises: ConfigError for a folder or file that is missing, and for what it says.
    """
    located = locate_folder(Path(path))
    return read_config(located.config, name=located.name)


def build(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    numerics: Numerics,
    *,
    num_threads: int,
    available_bytes: int | None = None,
    home: Home | None = None,
    progress: Progress | None = None,
    share: Share | None = None,
) -> LoadedModel:
    """A model of `spec` from an opened checkpoint; what `load` does once it knows the spec.

    Raises: as `load`, but for the config.
    """
    names = _family(checkpoint.path, spec)
    accounting = account(checkpoint, spec, names)
    plan = contiguous_plan(tuple(moe.num_experts for _, moe in spec.moe_layers), 1)
    if share is not None:
        plan = share.plan
    rank, num_slices = 0 if share is None else share.rank, plan.num_slices
    check_leaves(spec, numerics)
    check_slices(numerics.matmul_shards, num_slices)
    tensor = None if share is None else share.tensor
    local_spec = spec if tensor is None else tensor.split.model(spec)
    if tensor is not None:
        accounting = accounting.split(spec, tensor.split)
    held = held_experts(spec.moe_layers, plan, rank)
    home = home or Home()
    rooms = _rooms(home, checkpoint, spec, numerics, accounting, held, tensor, num_slices)
    parts = 1 if tensor is None else tensor.split.size
    weight_bytes = need = weight_bytes_of(accounting, numerics, held, num_slices)
    if home.shared_in is not None:
        missing = rooms.missing_bytes()
        need = missing["experts"] + missing["rest"] // max(1, home.num_ranks // parts)
        need += widened_bytes_of(accounting, numerics)
    rooms.check(checkpoint.path)
    check_memory(checkpoint, accounting, numerics, need, available_bytes)
    ops = choose(numerics, num_threads=num_threads)
    proof = ops.prove(
        matmul_shapes(accounting, numerics),
        float32_weights=router_shapes(accounting),
        heads=[
            _head_widths(layer.mixer) for layer in spec.layers if isinstance(layer.mixer, GqaSpec | MlaSpec)
        ],
    )
    if tensor is not None:
        ops.prove_split(split_shapes(accounting, numerics), items=_head_maps(spec))
    ops.prove_split(slice_shapes(spec, numerics, num_slices))
    reading, store = Reading(checkpoint, accounting, progress), None
    if spec.moe_layers:
        memory = rooms.open("experts", progress)
        experts = ExpertLoader(spec.moe_layers, numerics.formats, plan=plan, rank=rank, memory=memory)
        store = read_experts(reading, accounting, experts, memory)
    room = Room(rooms.open("rest", progress), rooms.rest_chunk_bytes)
    weights = read_rest(reading, spec, numerics, accounting, store, room)
    if share is None:
        dispatcher: Dispatcher | FusedRanks = Local(spec.moe_layers, numerics)
    else:
        dispatcher = share.dispatcher(spec, numerics, {} if store is None else store.down_biases)
    placed, meter = None, Meter()
    if weights.store is not None:
        layer_idxs = [layer_idx for layer_idx, _ in spec.moe_layers]
        moves = None if share is None else share.moves
        placed = Placed(plan, weights.store, dispatcher, layer_idxs, moves)
    done = (decoding_note(checkpoint, accounting, numerics), rooms.shared_note())
    return LoadedModel(
        spec=spec,
        numerics=numerics,
        ops=ops,
        decoder=_Parts(spec, local_spec, weights, ops, dispatcher, meter, tensor).decoder(),
        placed=placed,
        meter=meter,
        traffic=None if share is None else share.traffic,
        weight_bytes=weight_bytes,
        accounting=accounting,
        notes=tuple(note for note in done if note is not None),
        lacks=rooms.lacks(),
        tensor_digests=checkpoint.digests(),
        local_spec=local_spec,
        proof=proof,
    )


def _rooms(
    home: Home,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    numerics: Numerics,
    accounting: Accounting,
    held: Held,
    tensor: TensorShare | None,
    num_slices: int,
) -> Rooms:
    num_runs, split = max(1, len(home.nodes)), None if tensor is None else tensor.split
    return Rooms(
        home,
        identity(checkpoint, spec, numerics, num_runs, held, split, num_slices),
        arena_runs(spec.moe_layers, numerics.formats, held, num_runs, num_slices),
        rest_bytes_of(accounting, numerics),
    )


def _family(folder: Path, spec: ModelSpec) -> WeightMap:
    """The names of a spec's family; `folder` is what messages name.

    Raises: UnsupportedModelError naming each feature that the engine lacks.
    """
    if spec.runnable_reasons:
        raise UnsupportedModelError(
            f"{folder}: model type {spec.model_type} is not run by this build: "
            f"{'; '.join(spec.runnable_reasons)}. Model types that run: {', '.join(RUNNABLE_TYPES)}"
        )
    if spec.family not in FAMILIES:
        raise UnsupportedModelError(
            f"{folder}: no model is built for family {spec.family!r}; {nearest(spec.family, FAMILIES)}"
        )
    return FAMILIES[spec.family]


def _head_widths(mixer: GqaSpec | MlaSpec) -> tuple[int, int]:
    """Key width and value width of a head, as attention sees it."""
    if isinstance(mixer, MlaSpec):
        return mixer.kv_lora_rank + mixer.rope_dim, mixer.kv_lora_rank
    return mixer.head_dim, mixer.head_dim


def _head_maps(spec: ModelSpec) -> list[tuple[int, int]]:
    """The per-head matmuls of latent attention, as (in, out)."""
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, MlaSpec)]
    into = [(mixer.nope_dim, mixer.kv_lora_rank) for mixer in mixers]
    return into + [(mixer.kv_lora_rank, mixer.value_dim) for mixer in mixers]


class _Parts:
    """Makes the layers of one model; what layers share (rope tables, the dispatcher) is made once."""

    def __init__(
        self,
        whole: ModelSpec,
        spec: ModelSpec,
        weights: Weights,
        ops: Ops,
        dispatcher: Dispatcher | FusedRanks,
        meter: Meter,
        tensor: TensorShare | None,
    ) -> None:
        self.whole = whole
        self.spec = spec
        self.tensor = tensor
        self.weights = weights
        self.ops = ops
        self.ropes: dict[RopeSpec, RopeTable] = {}
        self.dispatcher = dispatcher
        self.meter = meter
        self.num_moe = 0

    def decoder(self) -> Decoder:
        """All of them, and what is before and behind."""
        spec, weights = self.spec, self.weights
        return Decoder(
            embedding_VD=weights.model["embedding"],
            layers=[self.layer(layer_idx, layer) for layer_idx, layer in enumerate(spec.layers)],
            norm=self.norm(weights.model, "norm"),
            head=Head(
                weight_VD=weights.head_VD,
                bias_V=weights.model.get("head_bias"),
                scale=spec.logit_scale,
                softcap=spec.logit_softcap,
                ops=self.ops,
            ),
            embedding_scale=spec.embedding_scale,
        )

    def layer(self, layer_idx: int, layer: LayerSpec) -> DecoderLayer:
        """The layer, with its weights."""
        norms, scale = self.weights.floats(layer_idx, "norm"), self.spec.residual_scale
        mixer, ffn = None, None
        if layer.mixer is not None:
            mixer = self.fused(
                layer_idx,
                MixerHalf(
                    norm=self.norm(norms, "mixer"),
                    mixer=self.mixer(layer_idx, layer.mixer),
                    out_norm=self.norm(norms, "mixer_out") if layer.has_out_norms else None,
                    scale=scale,
                ),
            )
        if layer.ffn is not None:
            has_own_norms = isinstance(layer.ffn, MoeSpec) and layer.ffn.has_branch_norms
            ffn = self.fused_ffn(
                FfnHalf(
                    layer_idx=layer_idx,
                    norm=None if has_own_norms else self.norm(norms, "ffn"),
                    ffn=self.ffn(layer_idx, layer.ffn),
                    out_norm=self.norm(norms, "ffn_out") if layer.has_out_norms else None,
                    scale=scale,
                )
            )
        return DecoderLayer(mixer=mixer, ffn=ffn, scale=norms.get("scale"))

    def norm(self, weights: Mapping[str, Tensor], name: str) -> Norm:
        """The norm of the model's kind whose weight is `name`, and its bias `name`_bias."""
        if self.spec.norm == "layer":
            return LayerNorm(weights[name], weights.get(f"{name}_bias"), self.spec.norm_eps, self.ops)
        assert not self.spec.has_norm_bias, "root-mean-square norms have no bias"
        return RmsNorm(weights[name], self.spec.norm_eps, self.ops)

    def mixer(self, layer_idx: int, mixer: object) -> Mixer:
        """Grouped-query, latent or linear attention over one rank's pool."""
        # Taken out, not looked up: latent attention keeps kv_b in a form of its own; this one can be freed.
        sinks_H = self.weights.floats(layer_idx, "mixer").get("sinks")
        weights = self.weights.layers[layer_idx].pop("mixer")
        if isinstance(mixer, MlaSpec):
            attend = PagedAttend.of(mixer, self.ops)
            return MlaAttention(
                mixer,
                weights,
                self.ops,
                self.rope(mixer.rope),
                attend,
                norm_eps=LATENT_NORM_EPS,
                shared=self.sums(layer_idx),
            )
        if isinstance(mixer, LinearSpec):
            return GatedDelta(mixer, weights, self.ops, norm_eps=self.spec.norm_eps)
        assert isinstance(mixer, GqaSpec), (
            "other mixers have no parameters and were refused by the accounting"
        )
        attend = PagedAttend.of(mixer, self.ops, sinks_H)
        rope = None if mixer.rope is None else self.rope(mixer.rope)
        return GqaAttention(
            mixer,
            weights,
            self.ops,
            rope,
            attend,
            norm_eps=self.spec.norm_eps,
            share=self.heads(layer_idx),
        )

    def heads(self, layer_idx: int) -> HeadShare | None:
        """Which heads of a layer are here; None: all."""
        mixer, sums = self.whole.layers[layer_idx].mixer, self.sums(layer_idx)
        if self.tensor is None or sums is None:
            return None
        assert isinstance(mixer, GqaSpec), "the layer has heads of this kind"
        split = self.tensor.split
        return HeadShare(
            all_heads=mixer.num_heads,
            all_kv_heads=mixer.num_kv_heads,
            first_head=split.part(mixer.num_heads).start,
            first_kv_head=split.kv_heads(mixer).start,
            shared=sums,
        )

    def sums(self, layer_idx: int) -> TreeSum | None:
        """How this layer's row-parallel matmuls are added over ranks; None: they are whole here."""
        return None if self.tensor is None else self.tensor.ranks.sums(layer_idx)

    def fused(self, layer_idx: int, half: MixerHalf) -> MixerHalf | FusedGqa:
        """In one call where this rank has all heads and kernels can; else in parts, with the same bits."""
        is_plain = half.out_norm is None and half.scale == 1.0
        if is_plain and isinstance(half.mixer, GqaAttention) and isinstance(half.norm, RmsNorm):
            return half.mixer.fused(layer_idx, half.norm) or half
        return half

    def fused_ffn(self, half: FfnHalf) -> FfnHalf | SparseHalf:
        """In one call where the experts are one and the call does all that is beside them; else part by part,
        with the same bits."""
        block, norm = half.ffn, half.norm
        if not (isinstance(block, MoeBlock) and isinstance(norm, RmsNorm)):
            return half
        is_plain = half.out_norm is None and half.scale == 1.0
        if not (
            is_plain and isinstance(block.router, Router) and isinstance(block.routed, Fused | FusedLayer)
        ):
            return half
        router, shared = block.router.fused(half.layer_idx, norm.weight_D, norm.eps), None
        if isinstance(block.shared, DenseBlock):
            shared = block.shared.fused(half.layer_idx)
        if router is None or (shared is None and block.shared is not None):
            return half
        return block.routed.half(block.moe_idx, router, shared) or half

    def rope(self, spec: RopeSpec) -> RopeTable:
        """The table of a spec, shared by all layers that have it."""
        if spec not in self.ropes:
            self.ropes[spec] = RopeTable(spec, self.spec.max_position)
        return self.ropes[spec]

    def ffn(self, layer_idx: int, ffn: DenseSpec | MoeSpec) -> Dense | MoeBlock:
        """The dense network, or the sparse block with one rank's dispatcher."""
        weights = self.weights.layers[layer_idx]
        if isinstance(ffn, DenseSpec):
            return DenseBlock(ffn, weights["dense"], self.ops, self.sums(layer_idx))
        store = self.weights.store
        assert store is not None, "a model with sparse layers has a store"
        self.num_moe += 1
        return MoeBlock(
            moe_idx=self.num_moe - 1,
            router=self.router(ffn, self.weights.floats(layer_idx, "router")),
            routed=self.routed(layer_idx, ffn, store),
            shared=None
            if ffn.shared is None
            else DenseBlock(ffn.shared, weights["shared"], self.ops, self.sums(layer_idx)),
            norms=self.branch_norms(layer_idx) if ffn.has_branch_norms else BranchNorms(),
        )

    def routed(self, layer_idx: int, ffn: MoeSpec, store: ResidentStore) -> RoutedExperts:
        """In one call where the layout says so, or all experts are here and kernels can; else one by one.

        The bits are the same.
        """
        if isinstance(self.ops, NativeOps) and isinstance(self.dispatcher, Local):
            return Fused(layer_idx, ffn, store, self.ops, self.meter)
        if isinstance(self.dispatcher, FusedRanks):
            routed: RoutedExperts = self.dispatcher.layer(layer_idx, ffn, store, self.ops, self.meter)
        else:
            loop = LoopFfn(ffn, store, self.ops, num_slices=store.num_slices)
            routed = Staged(tokens=self.dispatcher, experts=self.dispatcher, ffn=loop, meter=self.meter)
        if self.tensor is None or not self.tensor.has_own_rows:
            return routed
        return SplitRows(routed, self.tensor.ranks, torch_dtype(self.ops.numerics.seam_dtype))

    def branch_norms(self, layer_idx: int) -> BranchNorms:
        """The norms around the experts and around the network beside them."""
        weights = self.weights.floats(layer_idx, "norm")
        return BranchNorms(
            routed_in=self.norm(weights, "routed_in"),
            routed_out=self.norm(weights, "routed_out"),
            shared_in=self.norm(weights, "ffn"),
            shared_out=self.norm(weights, "shared_out"),
        )

    def router(self, ffn: MoeSpec, weights: Mapping[str, Tensor]) -> Router:
        """The gate of a layer, in float32."""
        input_norm = None
        if ffn.gate.has_input_norm:
            scale_D = weights["input_scale"]
            input_norm = RmsNorm(scale_D * scale_D.numel() ** -0.5, self.spec.norm_eps, self.ops)
        return Router(
            ffn,
            weights["weight"],
            weights.get("selection_bias"),
            weights.get("logit_bias"),
            self.ops,
            input_norm=input_norm,
            expert_scale_E=weights.get("expert_scale"),
        )
