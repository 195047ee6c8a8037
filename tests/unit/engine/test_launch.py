"""What is told of several ranks as of one engine: their pools together and apart, and who says what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import CONFIGS

from moesaic.engine.launch import _by_rank, _kv_bytes
from moesaic.engine.layout import data_parallel
from moesaic.spec.families import read_config
from moesaic.spec.numerics import preset


@pytest.mark.parametrize(
    ("num_ranks", "tp", "heads"), [(1, 1, [4]), (2, 1, [4, 4]), (6, 3, [2, 1, 1, 2, 1, 1])]
)
def test_a_rank_has_a_pool_of_its_own_kv_heads(num_ranks: int, tp: int, heads: list[int]) -> None:
    config = CONFIGS["olmoe"](num_attention_heads=4, num_key_value_heads=4)
    model: Any = SimpleNamespace(
        spec=read_config(config, name="config.json"),
        numerics=preset("portable", dtype="bfloat16", matmul_shards=4),
        layout=data_parallel(num_ranks, tp=tp),
    )
    found = _kv_bytes(model, SimpleNamespace(num_blocks=(8,)))  # type: ignore[arg-type]
    assert min(found) > 0
    assert [one * min(heads) // min(found) for one in found] == heads


def test_what_all_ranks_say_is_said_once() -> None:
    assert _by_rank([("a", "b"), ("a",), ("a", "b")]) == ("a", "rank 0, 2: b")
    assert _by_rank([("a",)]) == ("a",)
