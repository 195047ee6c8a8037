from __future__ import annotations

from collections import Counter

import pytest

from moesaic.sched.prefix import BlockPool


def key(i: int) -> bytes:
    return i.to_bytes(16, "little")


def test_blocks_without_a_key_are_free_again_at_once() -> None:
    pool = BlockPool(2)
    assert [pool.take(), pool.take()] == [0, 1]
    assert pool.num_available == 0
    pool.drop(0)
    pool.drop(1)
    assert (pool.num_available, pool.num_idle) == (2, 0)
    pool.check({})


def test_the_least_recently_dropped_block_goes_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.take() for _ in range(3)]
    for i in blocks:
        pool.publish(i, key(i))
    for i in (1, 0, 2):
        pool.drop(i)
    pool.hold(1)  # used again: now the newest once dropped
    pool.drop(1)
    assert [pool.take() for _ in range(3)] == [0, 2, 1]
    assert [pool.find(key(i)) for i in range(3)] == [None, None, None]
    pool.check(Counter([0, 1, 2]))


def test_free_blocks_go_before_content_is_given_up() -> None:
    pool = BlockPool(2)
    kept = pool.take()
    pool.publish(kept, key(0))
    pool.drop(kept)
    assert pool.take() != kept
    assert pool.find(key(0)) == kept


def test_the_first_block_with_a_content_stays_the_findable_one() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    pool.publish(first, key(0))
    pool.publish(second, key(0))
    pool.publish(first, key(1))
    assert pool.find(key(0)) == first
    assert pool.find(key(1)) is None
    pool.drop(second)
    assert pool.num_idle == 0
    pool.check({first: 1})


def test_a_shared_block_is_idle_only_after_its_last_holder() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.publish(block, key(0))
    pool.hold(block)
    pool.drop(block)
    assert pool.num_idle == 0
    assert pool.refs(block) == 1
    pool.drop(block)
    assert pool.num_idle == 1


def test_forgotten_content_is_not_found_and_its_block_is_freed() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.publish(block, key(0))
    pool.forget(block)
    assert pool.find(key(0)) is None
    pool.drop(block)
    assert (pool.num_available, pool.num_idle) == (1, 0)


def test_misuse_is_an_internal_error() -> None:
    pool = BlockPool(1)
    block = pool.take()
    with pytest.raises(AssertionError, match="exhausted"):
        pool.take()
    pool.drop(block)
    with pytest.raises(AssertionError, match="more often"):
        pool.drop(block)


@pytest.mark.parametrize("holders", [{}, {0: 2}, {1: 1}])
def test_check_sees_wrong_holders(holders: dict[int, int]) -> None:
    pool = BlockPool(2)
    pool.take()
    pool.check({0: 1})
    with pytest.raises(AssertionError):
        pool.check(holders)


def test_check_sees_a_lost_and_a_doubled_block() -> None:
    pool = BlockPool(2)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check({})
    pool = BlockPool(2)
    pool._refs[1] = 1
    with pytest.raises(AssertionError, match="two places"):
        pool.check({1: 1})
