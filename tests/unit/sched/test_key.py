from __future__ import annotations

from dataclasses import replace

import pytest
from hash_model import SCOPE, make_request, make_scheduler, tokens_group
from hypothesis import given
from hypothesis import strategies as st

from moesaic.sched.key import block_keys, extend_keys

BLOCK = 16


@given(
    tokens=st.lists(st.integers(0, 2**31), min_size=1, max_size=100),
    data=st.data(),
)
def test_a_change_at_token_t_keeps_the_blocks_before_it_and_no_other(
    tokens: list[int], data: st.DataObject
) -> None:
    changed_idx = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[changed_idx] += 1
    before, after = block_keys(SCOPE, tokens, BLOCK), block_keys(SCOPE, changed, BLOCK)
    assert len(before) == len(tokens) // BLOCK
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [idx < changed_idx // BLOCK for idx in range(len(before))]


@pytest.mark.parametrize("name", ["model_digest", "numerics_digest", "tokenizer_digest", "positions", "salt"])
def test_every_part_of_the_scope_changes_every_key(name: str) -> None:
    tokens = list(range(64))
    other = replace(SCOPE, **{name: "other"})
    assert not set(block_keys(SCOPE, tokens, BLOCK)) & set(block_keys(other, tokens, BLOCK))


def test_keys_are_16_bytes_and_do_not_depend_on_the_process() -> None:
    keys = block_keys(SCOPE, range(32), BLOCK)
    assert [key.hex() for key in keys] == [
        "5f1cabcc814a9b1a48c7bc7dece7d40f",
        "877c95cb533f42b3ed274986877f12b8",
    ]


@given(tokens=st.lists(st.integers(0, 9), max_size=40), cut=st.integers(0, 40))
def test_extending_is_the_same_as_starting_over(tokens: list[int], cut: int) -> None:
    keys = list(block_keys(SCOPE, tokens[:cut], 4))
    extend_keys(keys, SCOPE.root(), tokens, 4)
    assert tuple(keys) == block_keys(SCOPE, tokens, 4)


def test_equal_blocks_at_different_places_have_different_keys() -> None:
    first, second = block_keys(SCOPE, [7] * 32, BLOCK)
    assert first != second


def test_sampling_is_no_part_of_a_key() -> None:
    scheduler = make_scheduler([tokens_group()], [64])
    for i, temperature in enumerate((0.0, 1.5)):
        scheduler.add(make_request(f"r{i}", range(20), temperature=temperature, seed=i), 0.0)
    first, second = (scheduler._live[name] for name in ("r0", "r1"))
    assert first.root == second.root
