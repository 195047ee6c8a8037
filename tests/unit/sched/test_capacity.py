from __future__ import annotations

import pytest
from hash_model import state_group, tokens_group, window_group
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import CapacityError
from moesaic.sched.capacity import WINDOWS_KEPT, pool_sizes, useful_bytes
from moesaic.sched.ledger import CacheGroup
from moesaic.sched.scheduler import Limits

LIMITS = Limits(max_num_seqs=4, max_tokens_per_step=32, max_model_len=256, max_waiting=10)


def total_bytes(groups: list[CacheGroup], counts: tuple[int, ...]) -> int:
    return sum(group.unit_bytes * count for group, count in zip(groups, counts, strict=True))


@given(kv_bytes=st.integers(10_000, 10_000_000), window=st.integers(1, 100), has_state=st.booleans())
def test_pools_fit_and_leave_less_than_a_block(kv_bytes: int, window: int, has_state: bool) -> None:
    groups = [window_group(window), tokens_group(), *([state_group()] if has_state else [])]
    counts = pool_sizes(groups, kv_bytes, LIMITS, 4)
    assert 0 <= kv_bytes - total_bytes(groups, counts) < 64 + 32
    assert counts[0] <= counts[1]
    assert counts[0] <= WINDOWS_KEPT * 4 * groups[0].min_units(4) + 8
    assert counts[2:] == ((8,) if has_state else ())


def test_windows_alone_take_what_they_need_and_no_more() -> None:
    group = window_group(9)
    assert pool_sizes([group], 10**9, LIMITS, 4) == (WINDOWS_KEPT * 4 * 3 + 8,)


def test_too_little_for_one_request_is_refused_with_what_would_fit() -> None:
    with pytest.raises(
        CapacityError,
        match=r"4095 B is too small: one request of 256 tokens needs 4096 B; lower max_model_len to 252",
    ):
        pool_sizes([tokens_group()], 4095, LIMITS, 4)
    assert pool_sizes([tokens_group()], 4096, LIMITS, 4) == (64,)
    with pytest.raises(CapacityError, match="lower max_num_seqs"):
        pool_sizes([tokens_group(), state_group()], 799, LIMITS, 4)


@pytest.mark.parametrize("groups", [[tokens_group()], [window_group(9), tokens_group()], [state_group()]])
def test_the_useful_size_holds_every_request_at_full_length_and_no_more(groups: list[CacheGroup]) -> None:
    counts = pool_sizes(groups, useful_bytes(groups, LIMITS, 4), LIMITS, 4)
    assert [count for group, count in zip(groups, counts, strict=True) if group.kind == "tokens"] == [
        4 * 64
    ] * sum(group.kind == "tokens" for group in groups)
    assert total_bytes(groups, counts) == useful_bytes(groups, LIMITS, 4)
