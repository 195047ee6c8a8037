"""Parts of a replica: leaves, subtrees and heads add up to the whole; what cannot be cut is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.errors import ConfigError
from moesaic.spec.model import DenseSpec, GqaSpec, LayerSpec, LinearSpec, ModelSpec
from moesaic.spec.numerics import FormatMap, FormatPair, preset
from moesaic.spec.tensor_split import (
    WHOLE,
    Cut,
    Subtree,
    TensorSplit,
    check_leaves,
    check_tensor_parallel,
    subtrees,
)

GQA = GqaSpec(num_heads=8, num_kv_heads=2, head_dim=16, rope=None, softmax_scale=0.25)
LAYER = LayerSpec(mixer=GQA, ffn=DenseSpec(width=64))


def model(mixer: object = GQA, width: int = 64) -> ModelSpec:
    return ModelSpec(
        model_type="m",
        family="m",
        reader="exact",
        hidden=64,
        vocab=10,
        layers=(LayerSpec(mixer=mixer, ffn=DenseSpec(width=width)),),  # type: ignore[arg-type]
        norm_eps=1e-6,
        max_position=64,
        dtype="float32",
        has_tied_head=True,
        weight_format="float32",
    )


def split(rank: int, size: int, num_leaves: int = 4) -> TensorSplit:
    return TensorSplit(rank=rank, size=size, num_leaves=num_leaves)


@pytest.mark.parametrize("num_leaves", [1, 2, 4, 8, 16])
def test_every_leaf_is_in_one_subtree_of_one_rank(num_leaves: int) -> None:
    for size in range(1, num_leaves + 1):
        runs = [split(rank, size, num_leaves).leaves for rank in range(size)]
        assert [leaf for run in runs for leaf in run] == list(range(num_leaves))
        assert min(len(run) for run in runs) >= 1
        assert len(runs[0]) == max(len(run) for run in runs)  # no pool is larger than the first one's
        for run in runs:
            trees = subtrees(run)
            spans = [range(one.node << one.level, one.node + 1 << one.level) for one in trees]
            assert [leaf for span in spans for leaf in span] == list(run)
            assert len(trees) <= 2 * num_leaves.bit_length()


def test_subtrees_are_as_large_as_their_place_allows() -> None:
    assert subtrees(range(3, 8)) == (Subtree(0, 3), Subtree(2, 1))
    assert subtrees(range(3)) == (Subtree(1, 0), Subtree(0, 2))


def test_kv_heads_follow_the_heads_that_read_them() -> None:
    three = [split(rank, 3) for rank in range(3)]
    assert [list(one.part(8)) for one in three] == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert [list(one.kv_heads(GQA)) for one in three] == [[0], [1], [1]]
    mixer = three[1].model(model()).layers[0].mixer
    assert isinstance(mixer, GqaSpec)
    assert (mixer.num_heads, mixer.num_kv_heads) == (2, 1)


def test_rows_and_columns_of_a_rank() -> None:
    one = split(1, 2)
    assert one.cut(LAYER, "mixer", "q") == Cut(rows=range(64, 128))
    assert one.cut(LAYER, "mixer", "v") == Cut(rows=range(16, 32))
    assert one.cut(LAYER, "mixer", "o") == Cut(columns=range(64, 128))
    assert one.cut(LAYER, "mixer", "o_bias") == WHOLE
    assert one.cut(LAYER, "dense", "down") == Cut(columns=range(32, 64))
    assert one.cut(LAYER, "dense", "gate_bias") == Cut(rows=range(32, 64))
    assert one.cut(LAYER, "norm", "mixer") == WHOLE
    # A norm over all heads needs them all; values have none.
    full = replace(LAYER, mixer=replace(GQA, qk_norm="full"))
    assert one.cut(full, "mixer", "k") == WHOLE
    assert one.cut(full, "mixer", "v") == Cut(rows=range(16, 32))
    assert Cut(columns=range(64, 128)).shape((10, 128)) == (10, 64)


@pytest.mark.parametrize(
    ("mixer", "size", "num_leaves", "message"),
    [
        (GQA, 3, 8, r"tp 3 .* query heads 3 to 5, and 4 share a KV head: .* tp can be 1, 2, 4, 5$"),
        (replace(GQA, num_heads=6, num_kv_heads=6), 4, 4, r"0 to 1.5 of 6 heads .*tp can be 1, 2"),
        (replace(GQA, num_heads=6, num_kv_heads=2), 4, 8, r"of 6 heads .* tp can be 1, 2"),
        (
            LinearSpec(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, conv_width=4),
            2,
            4,
            "recurrent mixers are not split, and tp is 2: use ranks with requests of their own",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_arithmetic(
    mixer: object, size: int, num_leaves: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tensor_parallel(model(mixer), size, num_leaves)
    check_tensor_parallel(model(mixer), 1, num_leaves)


def test_leaves_that_are_not_whole_are_refused_before_a_weight_is_read() -> None:
    numerics = preset("portable", dtype="float32", matmul_shards=4)
    check_leaves(model(), numerics)
    with pytest.raises(ConfigError, match=r"layer 0, down: .*= 4 does not divide an inner width of 66"):
        check_leaves(model(width=66), numerics)
    packed = replace(numerics, formats=FormatMap(default=FormatPair.of("int4-g128")))
    with pytest.raises(ConfigError, match=r"layer 0, o of attention: int4-g128 .* 128 / 4 = 32 is not"):
        check_leaves(model(), packed)


def test_leaves_are_part_of_the_numerics() -> None:
    assert preset("portable", dtype="float32").matmul_shards == 1
    digests = {preset("portable", dtype="float32", matmul_shards=n).digest() for n in (1, 2, 4)}
    assert len(digests) == 3
