"""How a budget of bytes becomes blocks: the pool sizes of every cache group."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.errors import CapacityError
from moesaic.sched.ledger import STATE_SLOTS, CacheGroup
from moesaic.sched.scheduler import Limits

WINDOWS_KEPT = 2  # per running request: its own window, and one kept for a later request that continues it
"""guess: fewer make window groups, which hold little, the reason why prefixes are not found again."""


def pool_sizes(groups: Sequence[CacheGroup], kv_bytes: int, limits: Limits, kv_block: int) -> tuple[int, ...]:
    """Blocks (or state slots) per group that fit in `kv_bytes` together, in group order.

    States get what `max_num_seqs` requests need, windows what those need at most, and groups that keep every
    token share the rest equally in blocks, since every token takes a place in each.

    Units:   kv_bytes of one attention replica.
    Raises:  CapacityError when one request of `max_model_len` tokens does not fit.
    """
    low, high = 0, 1
    while _bytes(groups, _counts(groups, high, limits, kv_block)) <= kv_bytes and high < 2**40:
        low, high = high, 2 * high
    while high - low > 1:
        mid = (low + high) // 2
        fits = _bytes(groups, _counts(groups, mid, limits, kv_block)) <= kv_bytes
        low, high = (mid, high) if fits else (low, mid)
    needed = _counts(groups, -(-limits.max_model_len // kv_block), limits, kv_block)
    found = _counts(groups, low, limits, kv_block)
    if any(have < need for have, need in zip(found, needed, strict=True)):
        num_tokens = -(-limits.max_model_len // kv_block) * kv_block
        has_others = any(group.kind != "tokens" for group in groups)
        beside = f" beside the states and windows of {limits.max_num_seqs}" if has_others else ""
        hints = [f"lower max_model_len to {low * kv_block}"] if low else []
        hints += ["lower max_num_seqs"] if has_others else []
        hints.append("give the pool more memory")
        raise CapacityError(
            f"a KV pool of {kv_bytes} B is too small: one request of {num_tokens} tokens{beside} needs "
            f"{_bytes(groups, needed)} B; {', or '.join(hints)}"
        )
    return found


def useful_bytes(groups: Sequence[CacheGroup], limits: Limits, kv_block: int) -> int:
    """The largest pool that `max_num_seqs` requests of `max_model_len` tokens can use.

    Units:   bytes of one attention replica.
    """
    num_blocks = limits.max_num_seqs * -(-limits.max_model_len // kv_block)
    return _bytes(groups, _counts(groups, num_blocks, limits, kv_block))


def _counts(groups: Sequence[CacheGroup], num_blocks: int, limits: Limits, kv_block: int) -> tuple[int, ...]:
    """Units per group when groups that keep every token have `num_blocks` each."""
    chunk = -(-limits.max_tokens_per_step // kv_block)
    counts: list[int] = []
    for group in groups:
        per_request = group.min_units(kv_block)
        if group.kind == "state":
            counts.append(STATE_SLOTS * limits.max_num_seqs)
        elif group.kind == "window":
            counts.append(min(num_blocks, WINDOWS_KEPT * limits.max_num_seqs * per_request + chunk))
        else:
            counts.append(num_blocks)
    return tuple(counts)


def _bytes(groups: Sequence[CacheGroup], counts: Sequence[int]) -> int:
    return sum(group.unit_bytes * count for group, count in zip(groups, counts, strict=True))
