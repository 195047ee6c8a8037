"""Which tensor of a checkpoint fills which parameter, settled from names and shapes before a weight is read.

Every key is either consumed or declared unused by the family; every parameter is filled. Anything else is an
error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from moesaic.errors import CheckpointError, ConfigError
from moesaic.models.headers import Headers
from moesaic.models.names import Keys, PerExpert, Row, Stacked, Unused, WeightMap
from moesaic.models.parameter import Half, Shape, layer_parameters, norm_parameters
from moesaic.spec import mxfp4
from moesaic.spec.families import assumed_sizes
from moesaic.spec.locate import read_json_object
from moesaic.spec.model import ModelSpec, MoeSpec
from moesaic.spec.tensor_split import WHOLE, Cut, TensorSplit

_SHOWN = 5  # names in one error message


@dataclass(frozen=True, kw_only=True, slots=True)
class Filling:
    """One parameter and the tensor that fills it, or the two of a packed format.

    In half "experts" `name` is a part of an expert, or gate_up or gate_up_bias; `stacked` says how a tensor
    holds all experts of a layer.

    Shapes:  `shape` is the parameter's; the tensors' own are those of `tensors`.
    """

    key: str
    shape: Shape
    half: Half | Literal["model", "experts"]
    name: str
    layer_idx: int | None = None
    expert_id: int | None = None
    is_row: bool = False  # stored as [1, n] where the parameter is [n]
    stacked: Stacked | None = None
    offset: float = 0.0  # added to what is stored
    cut: Cut = WHOLE  # what this rank keeps of it

    @property
    def stored_shape(self) -> Shape:
        """The tensor's shape in the checkpoint, where it is one tensor."""
        return (1, *self.shape) if self.is_row else self.shape

    @property
    def tensors(self) -> dict[str, Shape]:
        """The tensors of the checkpoint that hold it, with the shapes they must have."""
        if self.stacked is None:
            return {self.key: self.stored_shape}
        return self.stacked.tensors(self.key, self.shape)

    @property
    def packed(self) -> Literal["mxfp4"] | None:
        """The format in which its numbers are packed; None: a float each."""
        is_matrix = self.stacked is not None and len(self.shape) == 3
        return self.stacked.packed if self.stacked is not None and is_matrix else None

    @property
    def kept_shape(self) -> Shape:
        """The parameter's, as far as this rank keeps it."""
        return self.cut.shape(self.shape)

    @property
    def num_elements(self) -> int:
        """Numbers in the parameter."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnusedTensor:
    """A tensor that is known and not read into the model."""

    key: str
    num_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounting:
    """All tensors of a checkpoint: those that fill parameters, in reading order, and those that do not."""

    fillings: tuple[Filling, ...]
    unused: tuple[UnusedTensor, ...]
    tied_head: str | None = None  # the key of a stored head that must equal the embedding it is tied to

    def split(self, spec: ModelSpec, split: TensorSplit) -> Accounting:
        """The same for one of several tensor-parallel ranks, which keeps a part of some parameters."""
        fillings = (
            filling
            if filling.layer_idx is None
            else replace(filling, cut=split.cut(spec.layers[filling.layer_idx], filling.half, filling.name))
            for filling in self.fillings
        )
        return replace(self, fillings=tuple(fillings))

    @property
    def unused_bytes(self) -> int:
        """Bytes of the tensors that are known and unused."""
        return sum(tensor.num_bytes for tensor in self.unused)


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """All tensors and parameters, also those that do not fit each other."""

    accounting: Accounting
    missing: tuple[str, ...]  # keys of parameters that nothing fills
    unknown: tuple[str, ...]  # keys that nothing consumes


def account(checkpoint: Headers, spec: ModelSpec, names: WeightMap) -> Accounting:
    """Settle every key and every parameter.

    Raises: CheckpointError naming parameters that nothing fills and keys that nothing consumes (the first
            few and how many), a tensor of another shape or dtype, and experts in a model without, or a model
            with experts in a checkpoint without.
    """
    found = survey(checkpoint, spec, names)
    if found.missing or found.unknown:
        raise CheckpointError(_explain(checkpoint, spec, list(found.missing), list(found.unknown)))
    return found.accounting


def survey(checkpoint: Headers, spec: ModelSpec, names: WeightMap) -> Survey:
    """What `account` settles, and what it would refuse.

    Raises: CheckpointError for a tensor of another shape or dtype, and for experts on one side only.
    """
    try:
        return _survey(checkpoint, spec, names)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_assumed(checkpoint)}") from error


def _survey(checkpoint: Headers, spec: ModelSpec, names: WeightMap) -> Survey:
    names = names.of(checkpoint.names)
    missing: list[str] = []
    fillings = [*_model_fillings(spec, names), *_layer_fillings(checkpoint, spec, names)]
    known = {key for filling in fillings for key in filling.tensors}
    for filling in fillings:
        for key, shape in filling.tensors.items():
            if key in checkpoint.tensors:
                checkpoint.stored(key, shape=shape, is_packed=filling.packed is not None)
            else:
                missing.append(key)
    tied_head = names.head if spec.has_tied_head and names.head in checkpoint.tensors else None
    unused, unknown = [], []
    for key in sorted(checkpoint.names - known - {tied_head}):
        reason = _reason_unused(key, checkpoint, len(spec.layers), names.unused)
        if reason is None:
            unknown.append(key)
        else:
            unused.append(UnusedTensor(key=key, num_bytes=checkpoint.tensors[key].num_bytes, reason=reason))
    if tied_head is not None:
        checkpoint.stored(tied_head, shape=(spec.vocab, spec.hidden))
        num_bytes = checkpoint.tensors[tied_head].num_bytes
        reason = "equal to the embedding that the head is tied to"
        unused.append(UnusedTensor(key=tied_head, num_bytes=num_bytes, reason=reason))
    return Survey(
        accounting=Accounting(fillings=tuple(fillings), unused=tuple(unused), tied_head=tied_head),
        missing=tuple(missing),
        unknown=tuple(unknown),
    )


def _model_fillings(spec: ModelSpec, names: WeightMap) -> Iterator[Filling]:
    table = (spec.vocab, spec.hidden)
    yield Filling(key=names.embedding, shape=table, half="model", name="embedding")
    norm_keys = {"norm": names.norm, "norm_bias": names.norm_bias}
    for name, shape in norm_parameters("norm", spec.hidden, has_bias=spec.has_norm_bias).items():
        yield Filling(key=norm_keys[name], shape=shape, half="model", name=name, offset=spec.norm_offset)
    if not spec.has_tied_head:
        yield Filling(key=names.head, shape=table, half="model", name="head")
    if spec.has_head_bias:
        yield Filling(key=names.head_bias, shape=(spec.vocab,), half="model", name="head_bias")


def _layer_fillings(checkpoint: Headers, spec: ModelSpec, names: WeightMap) -> Iterator[Filling]:
    for layer_idx, layer in enumerate(spec.layers):
        prefix = names.layer_prefix.format(layer=layer_idx)
        halves = layer_parameters(layer, spec.hidden, has_norm_bias=spec.has_norm_bias)
        for half, parameters in halves.items():
            for name, shape in parameters.items():
                keys = names.layers[half][name]
                yield Filling(
                    key=_spelling(checkpoint, prefix, keys),
                    shape=shape,
                    half=half,
                    name=name,
                    layer_idx=layer_idx,
                    is_row=isinstance(keys, Row),
                    offset=spec.norm_offset if half == "norm" or name in ("q_norm", "k_norm") else 0.0,
                )
        if isinstance(layer.ffn, MoeSpec):
            yield from _expert_fillings(checkpoint, prefix, layer.ffn, names, layer_idx)


def _spelling(checkpoint: Headers, prefix: str, keys: Keys) -> str:
    if isinstance(keys, Row):
        return prefix + keys.key
    spellings = [prefix + key for key in ((keys,) if isinstance(keys, str) else keys)]
    return next((key for key in spellings if key in checkpoint.tensors), spellings[0])


def _expert_fillings(
    checkpoint: Headers, prefix: str, moe: MoeSpec, names: WeightMap, layer_idx: int
) -> Iterator[Filling]:
    E, F, D = moe.num_experts, moe.expert_width, moe.row_width
    layout = _expert_layout(checkpoint, prefix, names, layer_idx)
    if isinstance(layout, Stacked):
        _check_blocks(checkpoint, layout, D, F)
        shapes: dict[str, Shape] = {"gate_up": (E, 2 * F, D), "down": (E, D, F)}
        if moe.has_bias:
            shapes |= {"gate_up_bias": (E, 2 * F), "down_bias": (E, D)}
        keys = {"gate_up": layout.gate_up, "down": layout.down}
        keys |= {f"{name}_bias": f"{key}_bias" for name, key in keys.items()}
        for name, shape in shapes.items():
            yield Filling(
                key=prefix + keys[name],
                shape=shape,
                half="experts",
                name=name,
                layer_idx=layer_idx,
                stacked=layout,
            )
        return
    for expert_id in range(E):
        for name, part_shape in {"gate": (F, D), "up": (F, D), "down": (D, F)}.items():
            yield Filling(
                key=prefix + getattr(layout, name).format(expert=expert_id),
                shape=part_shape,
                half="experts",
                name=name,
                layer_idx=layer_idx,
                expert_id=expert_id,
            )


def _expert_layout(checkpoint: Headers, prefix: str, names: WeightMap, layer_idx: int) -> PerExpert | Stacked:
    """The layout of which this layer's first key is there."""
    first_keys = [prefix + layout.first_key for layout in names.experts]
    for layout, key in zip(names.experts, first_keys, strict=True):
        if key in checkpoint.tensors:
            return layout
    raise CheckpointError(
        f"config.json gives layer {layer_idx} experts, but {checkpoint.path} has none there (neither "
        f"{' nor '.join(first_keys)}); the config and the weights are of different models"
    )


def _check_blocks(checkpoint: Headers, layout: Stacked, *widths: int) -> None:
    """Packed rows are whole blocks.

    Raises: CheckpointError for a width that no number of blocks makes.
    """
    for width in widths:
        if layout.packed == "mxfp4" and width % mxfp4.BLOCK:
            raise CheckpointError(
                f"{checkpoint.path} stores experts as mxfp4, in blocks of {mxfp4.BLOCK} numbers, and "
                f"config.json gives their matrices rows of {width}; the config and the weights are of "
                "different models"
            )


def _reason_unused(
    key: str, checkpoint: Headers, num_layers: int, declared: tuple[Unused, ...]
) -> str | None:
    for unused in declared:
        match = re.fullmatch(unused.pattern, key)
        if match is None:
            continue
        if unused.marker is None:
            return unused.reason
        marker = key[: match.end(1)] + "." + unused.marker
        if int(match.group(1)) >= num_layers and marker in checkpoint.tensors:
            return unused.reason
    return None


def _explain(checkpoint: Headers, spec: ModelSpec, missing: list[str], unknown: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"{len(missing)} parameters are filled by no tensor: {_few(missing)}")
    if unknown:
        parts.append(f"{len(unknown)} tensors fill no parameter: {_few(unknown)}")
    beyond = [
        key
        for key in unknown
        if (m := re.search(r"\.layers\.(\d+)\.", key)) and int(m[1]) >= len(spec.layers)
    ]
    if any(".experts." in key for key in unknown) and not spec.moe_layers:
        what = f"has experts, but its config.json describes a dense model ({spec.model_type})"
    elif beyond:
        what = f"has more layers than the {len(spec.layers)} of its config.json ({spec.model_type})"
    else:
        what = f"does not match its config.json ({spec.model_type})"
    return (
        f"{checkpoint.path} {what}: {'; '.join(parts)}. Take config.json and weights from the same source"
        + _assumed(checkpoint)
    )


def _assumed(checkpoint: Headers) -> str:
    """A clause on the sizes that config.json leaves out, which may be why it does not match."""
    path = checkpoint.path / "config.json"
    try:
        sizes = assumed_sizes(read_json_object(path), name=str(path))
    except ConfigError:
        return ""  # the spec was made without this file
    if not sizes:
        return ""
    listed = ", ".join(f"{key} = {size}" for key, size in sizes.items())
    return (
        f". config.json leaves out sizes; its model_type's were taken ({listed}): write the model's own there"
    )


def _few(keys: list[str]) -> str:
    rest = len(keys) - _SHOWN
    return ", ".join(keys[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
