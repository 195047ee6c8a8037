"""Which part of a replica's matrices each of its tensor-parallel ranks holds: heads, rows and columns.

A row-parallel matmul has `num_leaves` equal parts of its inner width. Each rank has a run of leaves, and what
feeds them: the heads before `o`, the rows of gate and up before `down`.

    leaves       0   1   2   3          three ranks: 0 1 | 2 | 3
    8 heads      01  23  45  67         heads 0-3 on rank 0, 4 5 on rank 1, 6 7 on rank 2
    2 KV heads   0 0 0 0 1 1 1 1        KV head 1 is on ranks 1 and 2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from moesaic.errors import ConfigError
from moesaic.spec.model import DenseSpec, GqaSpec, LayerSpec, LinearSpec, MlaSpec, ModelSpec, MoeSpec
from moesaic.spec.numerics import Numerics
from moesaic.spec.quantised import check_shards_of


class Cut(NamedTuple):
    """What is kept of a parameter: a run of its rows, or of its columns; None: all."""

    rows: range | None = None
    columns: range | None = None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of what is kept."""
        rows = whole[0] if self.rows is None else len(self.rows)
        return (rows, *whole[1:]) if self.columns is None else (rows, len(self.columns))


WHOLE = Cut()


class Subtree(NamedTuple):
    """Node `node` of level `level` of the tree over leaves: leaves node * 2**level and the next 2**level."""

    level: int
    node: int

    @property
    def num_leaves(self) -> int:
        """Leaves under it."""
        return 1 << self.level


def subtrees(leaves: range) -> tuple[Subtree, ...]:
    """The largest whole subtrees that fill a run of leaves, in order."""
    found, at = [], leaves.start
    while at < leaves.stop:
        level = 0
        while at % (2 << level) == 0 and at + (2 << level) <= leaves.stop:
            level += 1
        found.append(Subtree(level, at >> level))
        at += 1 << level
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSplit:
    """Rank `rank` of the `size` that share one replica's matrices."""

    rank: int
    size: int
    num_leaves: int

    @property
    def leaves(self) -> range:
        """The leaves of this rank; the first ranks have the most."""
        return self.leaves_of(self.rank)

    def leaves_of(self, rank: int) -> range:
        """The leaves of another rank of the same replica."""
        return range(*(-(-at * self.num_leaves // self.size) for at in (rank, rank + 1)))

    def part(self, count: int, what: str = "numbers of an inner width") -> range:
        """This rank's part of `count` things, which `what` calls in the error.

        Raises: ConfigError where it would begin or end inside one.
        """
        first, stop = self.leaves.start * count, self.leaves.stop * count
        if first % self.num_leaves or stop % self.num_leaves:
            raise ConfigError(
                f"rank {self.rank} of {self.size} would have {first / self.num_leaves:g} to "
                f"{stop / self.num_leaves:g} of {count} {what} (leaves {self.leaves.start} to "
                f"{self.leaves.stop - 1} of {self.num_leaves})"
            )
        return range(first // self.num_leaves, stop // self.num_leaves)

    def kv_heads(self, spec: GqaSpec) -> range:
        """The KV heads that this rank's query heads read; some are on several ranks.

        Raises: ConfigError where the rank has parts of several.
        """
        heads, in_group = self.part(spec.num_heads, "heads"), spec.num_heads // spec.num_kv_heads
        held = range(heads.start // in_group, (heads.stop - 1) // in_group + 1)
        if len(held) > 1 and (heads.start % in_group or heads.stop % in_group):
            raise ConfigError(
                f"rank {self.rank} of {self.size} would have query heads {heads.start} to {heads.stop - 1}, "
                f"and {in_group} share a KV head: all of one and a part of another"
            )
        return held

    def model(self, spec: ModelSpec) -> ModelSpec:
        """The model as this rank has it: fewer heads, narrower dense networks; routed experts are whole.

        Raises: ConfigError where it cannot be cut so.
        """
        return replace(spec, layers=tuple(self._layer(layer) for layer in spec.layers))

    def cut(self, layer: LayerSpec, half: str, name: str) -> Cut:
        """What this rank keeps of a parameter of a layer, which is the whole one's."""
        if half == "mixer":
            return self._cut_mixer(layer.mixer, name)
        dense = layer.ffn.shared if isinstance(layer.ffn, MoeSpec) else layer.ffn
        if half not in ("dense", "shared") or dense is None:
            return WHOLE
        part = self.part(dense.width)
        if name == "down":
            return Cut(columns=part)
        return Cut(rows=part) if name in ("gate", "up", "gate_bias", "up_bias") else WHOLE

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        mixer, ffn = layer.mixer, layer.ffn
        if isinstance(mixer, GqaSpec):
            if mixer.qk_norm == "full" and (mixer.has_output_gate or mixer.value_is_key):
                raise ConfigError("a norm over all heads beside gated queries or shared values is not split")
            mixer = replace(
                mixer,
                num_heads=len(self.part(mixer.num_heads, "heads")),
                num_kv_heads=len(self.kv_heads(mixer)),
            )
        elif isinstance(mixer, MlaSpec):
            mixer = replace(mixer, num_heads=len(self.part(mixer.num_heads, "heads")))
        elif mixer is not None:
            raise ConfigError(
                f"recurrent mixers are not split, and tp is {self.size}: use ranks with requests of their "
                "own (--ranks without --tp)"
            )
        if isinstance(ffn, DenseSpec):
            ffn = self._dense(ffn)
        elif isinstance(ffn, MoeSpec) and ffn.shared is not None:
            ffn = replace(ffn, shared=self._dense(ffn.shared))
        return replace(layer, mixer=mixer, ffn=ffn)

    def _dense(self, spec: DenseSpec) -> DenseSpec:
        return replace(spec, width=len(self.part(spec.width)))

    def _cut_mixer(self, mixer: object, name: str) -> Cut:
        if isinstance(mixer, MlaSpec):
            heads = self.part(mixer.num_heads, "heads")
            if name in ("q", "q_b"):
                return Cut(rows=_scaled(heads, mixer.nope_dim + mixer.rope_dim))
            if name == "kv_b":
                return Cut(rows=_scaled(heads, mixer.nope_dim + mixer.value_dim))
            return Cut(columns=_scaled(heads, mixer.value_dim)) if name == "o" else WHOLE
        if not isinstance(mixer, GqaSpec):
            return WHOLE
        heads, width = self.part(mixer.num_heads, "heads"), mixer.head_dim
        if name == "o":
            return Cut(columns=_scaled(heads, width))
        if name == "sinks":
            return Cut(rows=heads)
        # A norm over all heads needs them all; the rank's own are taken after it.
        if name in ("q", "q_bias") and mixer.qk_norm != "full":
            return Cut(rows=_scaled(heads, 2 * width if mixer.has_output_gate else width))
        is_key = name in ("k", "k_bias") and mixer.qk_norm != "full"
        if is_key or name in ("v", "v_bias"):
            return Cut(rows=_scaled(self.kv_heads(mixer), width))
        return WHOLE


def _scaled(items: range, size: int) -> range:
    return range(items.start * size, items.stop * size)


def check_leaves(spec: ModelSpec, numerics: Numerics) -> None:
    """Whether every row-parallel matmul of a model has whole leaves.

    Raises: ConfigError naming layer and matrix, with the arithmetic.
    """
    format = numerics.formats.default.weight
    for layer_idx, layer in enumerate(spec.layers):
        for name, width in _inner_widths(layer):
            try:
                check_shards_of(format, width, numerics.matmul_shards)
            except ConfigError as error:
                raise ConfigError(f"layer {layer_idx}, {name}: {error}") from error


def check_slices(matmul_shards: int, num_slices: int) -> None:
    """Whether experts can be cut into so many slices: each has to have as many whole leaves as another.

    Raises: ConfigError with the arithmetic and the numbers that can.
    """
    if matmul_shards % num_slices == 0:
        return
    legal = ", ".join(str(1 << level) for level in range(matmul_shards.bit_length()))
    others = (
        f"; ask for --matmul-shards {num_slices}, also where bits are compared with one rank's"
        if num_slices & (num_slices - 1) == 0
        else ""
    )
    raise ConfigError(
        f"{num_slices} slices of an expert: matmul_shards / slices = {matmul_shards} / {num_slices} = "
        f"{matmul_shards / num_slices:g} leaves of its sum are not a whole number; with matmul_shards "
        f"{matmul_shards} experts can be cut into {legal}{others}"
    )


def _inner_widths(layer: LayerSpec) -> Iterator[tuple[str, int]]:
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(mixer, GqaSpec):
        yield "o of attention", mixer.num_heads * mixer.head_dim
    elif isinstance(mixer, MlaSpec):
        yield "o of attention", mixer.num_heads * mixer.value_dim
    elif isinstance(mixer, LinearSpec):
        yield "out of linear attention", mixer.num_value_heads * mixer.value_dim
    if isinstance(ffn, DenseSpec):
        yield "down", ffn.width
    elif isinstance(ffn, MoeSpec):
        yield "down of an expert", ffn.expert_width
        if ffn.shared is not None:
            yield "down of the shared expert", ffn.shared.width


def check_tensor_parallel(spec: ModelSpec, size: int, num_leaves: int) -> None:
    """Whether a replica's matrices can be cut for `size` ranks; one rank has them whole.

    Raises: ConfigError with the arithmetic and the numbers of ranks that can.
    """
    if size == 1:
        return
    reason = _why_not(spec, size, num_leaves)
    if reason is None:
        return
    if any(isinstance(layer.mixer, LinearSpec) for layer in spec.layers):
        raise ConfigError(reason)
    legal = [other for other in range(1, num_leaves + 1) if _why_not(spec, other, num_leaves) is None]
    shown = ", ".join(str(one) for one in sorted(sorted(legal, key=lambda one: abs(one - size))[:4]))
    raise ConfigError(
        f"tp {size} does not fit this model: {reason}; with matmul_shards {num_leaves} tp can be {shown}"
    )


def _why_not(spec: ModelSpec, size: int, num_leaves: int) -> str | None:
    try:
        for rank in range(size):
            TensorSplit(rank=rank, size=size, num_leaves=num_leaves).model(spec)
    except ConfigError as error:
        return str(error)
    return None
