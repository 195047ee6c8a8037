from __future__ import annotations

import random
from array import array
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import BLOCK, Heads, Sequence, reference_ops
from marks import needs_native

from moesaic.kernels import native
from moesaic.kernels.kv_view import KvPlaces, KvRow, KvView
from moesaic.kernels.ops import Ops, choose
from moesaic.spec.numerics import KV_FORMATS, DType, KvFormat, preset

pytestmark = needs_native
LEVELS = native.levels()
# Of numbers of size 1: float32 sums of some hundred terms, or one rounding to bfloat16.
TOLERANCE: dict[DType, float] = {"float32": 3e-6, "bfloat16": 1e-2}
SHAPES = [
    Heads(num_heads=4, num_groups=4, key_width=64),
    Heads(num_heads=8, num_groups=2, key_width=128),
    Heads(num_heads=8, num_groups=1, key_width=96, window=20, has_sinks=True),
    Heads(num_heads=6, num_groups=2, key_width=32, window=72, is_chunked=True),
    Heads(num_heads=7, num_groups=1, key_width=96, value_width=64),
    Heads(num_heads=3, num_groups=1, key_width=37, value_width=13),
    Heads(num_heads=2, num_groups=2, key_width=3, has_sinks=True),
    Heads(num_heads=70, num_groups=1, key_width=8),
]
LENGTH = 280  # beyond 256 positions a single row may be split over threads by lanes


def native_ops(
    level: str = LEVELS[-1] if LEVELS else "",
    dtype: DType = "float32",
    *,
    kv_lanes: int = 4,
    num_threads: int = 1,
    kv_format: KvFormat | None = None,
) -> Ops:
    numerics = preset("portable", dtype=dtype, backend=f"native/{level}", kv_format=kv_format)
    return choose(numerics.with_leaves(kv_lanes=kv_lanes), num_threads=num_threads)


def case_of(heads: Heads, ops: Ops, *, length: int = LENGTH, dtype: DType = "float32") -> Sequence:
    kv_format = ops.numerics.kv_format
    case = Sequence(heads, length, ops, dtype=getattr(torch, dtype), kv_format=kv_format)
    case.write(0, length)
    return case


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_equals_plain_attention(heads: Heads, level: str, dtype: DType) -> None:
    case = case_of(heads, native_ops(level, dtype), dtype=dtype)
    found = case.attend((0, LENGTH))
    assert found.dtype == getattr(torch, dtype)
    assert (found.double() - case.exact()).abs().max() <= TOLERANCE[dtype]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_bits_do_not_follow_the_step(data: st.DataObject) -> None:
    """Decode and prefill, alone and together, whole and in chunks, on any threads: the same bits."""
    heads = data.draw(st.sampled_from(SHAPES))
    level = data.draw(st.sampled_from(LEVELS))
    dtype = data.draw(st.sampled_from(sorted(TOLERANCE)))
    kv_format = data.draw(st.sampled_from(KV_FORMATS))
    kv_lanes = data.draw(st.sampled_from([1, 2, 4, 16, 64]))
    ops = native_ops(level, dtype, kv_lanes=kv_lanes, kv_format=kv_format)
    case = case_of(heads, ops, dtype=dtype)
    whole = case.attend((0, LENGTH))
    case.ops = native_ops(
        level, dtype, kv_lanes=kv_lanes, kv_format=kv_format, num_threads=data.draw(st.integers(1, 4))
    )
    starts = st.integers(0, LENGTH - 1)
    singles = [(start, 1) for start in data.draw(st.lists(starts, max_size=9))]
    chunks = [
        (start, min(count, LENGTH - start))
        for start, count in data.draw(st.lists(st.tuples(starts, st.integers(2, 64)), max_size=2))
    ]
    parts = [(LENGTH - 1, 1), *data.draw(st.permutations(singles + chunks))]
    expected = torch.cat([whole[start : start + count] for start, count in parts])
    assert torch.equal(case.attend(*parts), expected)
    assert torch.equal(case.attend((LENGTH - 1, 1)), whole[-1:]), "a single row is split over lanes"


@pytest.mark.parametrize("kv_block", [1, 2, 4, 8, 32, 64])
@pytest.mark.parametrize("level", LEVELS)
def test_any_size_of_block(level: str, kv_block: int) -> None:
    from dataclasses import replace

    numerics = replace(preset("portable", dtype="float32", backend=f"native/{level}"), kv_block=kv_block)
    ops = choose(numerics, num_threads=2)
    heads = Heads(num_heads=4, num_groups=2, key_width=20, window=33, has_sinks=True)
    case = Sequence(heads, 100, ops, kv_block=kv_block)
    case.write(0, 100)
    whole = case.attend((0, 100))
    assert (whole.double() - case.exact()).abs().max() <= TOLERANCE["float32"]
    assert torch.equal(case.attend((99, 1), (3, 40), (0, 1)), whole[[99, *range(3, 43), 0]])


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("level", LEVELS)
def test_agrees_with_the_reference_in_every_format(level: str, kv_format: KvFormat) -> None:
    """Both write the same bytes; what they read from them differs by the order of sums alone."""
    for heads in (SHAPES[1], SHAPES[2], SHAPES[5]):
        ours = case_of(heads, native_ops(level, kv_format=kv_format))
        theirs = case_of(heads, reference_ops(kv_format=kv_format))
        assert torch.equal(ours.key_pool.view(torch.uint8), theirs.key_pool.view(torch.uint8))
        found, expected = ours.attend((0, LENGTH)), theirs.attend((0, LENGTH))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_chunks_written_one_after_the_other_equal_the_whole(kv_format: KvFormat) -> None:
    ops = native_ops(dtype="bfloat16", kv_format=kv_format)
    heads = Heads(num_heads=4, num_groups=2, key_width=32)
    expected = case_of(heads, ops, length=150, dtype="bfloat16").attend((0, 150))
    chunked = Sequence(heads, 150, ops, dtype=torch.bfloat16, kv_format=kv_format)
    found = []
    for at, count in ((0, 7), (7, 1), (8, 1), (9, 70), (79, 71)):
        chunked.write(at, count)
        found.append(chunked.attend((at, count)))
    assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_visible_is_not_multiplied(level: str, poison: float) -> None:
    """Other blocks, the rest of the last block, the future of the sequence, and what a window has passed."""
    for heads in (SHAPES[0], SHAPES[2], SHAPES[4]):
        clean, dirty = (case_of(heads, native_ops(level, num_threads=2)) for _ in range(2))
        oldest = max(0, 150 - (heads.window or LENGTH))
        kept = range(oldest, 160)
        for pool in (dirty.key_pool, dirty.value_pool):
            if pool is None:
                continue
            before = pool.clone()
            pool.fill_(poison)
            for position in kept:
                at = (dirty.blocks[position // BLOCK], slice(None), position % BLOCK)
                pool[at] = before[at]
        assert torch.equal(dirty.attend((150, 10), (155, 1)), clean.attend((150, 10), (155, 1)))
        assert not dirty.attend((170, 1)).isfinite().all(), "what is visible must show"


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_a_poisoned_row_stays_poisoned_in_every_format(kv_format: KvFormat) -> None:
    case = Sequence(SHAPES[0], 40, native_ops(kv_format=kv_format), kv_format=kv_format)
    case.key_TGC[20, 1, 5] = float("inf")
    case.write(0, 40)
    found = case.attend((0, 40))
    assert found[20:, 1].isnan().all()
    assert found[:20].isfinite().all()
    assert found[20:, [0, 2, 3]].isfinite().all()


def test_lanes_and_blocks_meet_in_their_order() -> None:
    """Flipping the lanes changes bits, and so does a lane's order: equality above is no accident."""
    found = []
    for kv_lanes in (1, 2, 4):
        found.append(case_of(SHAPES[1], native_ops(kv_lanes=kv_lanes)).attend((0, LENGTH)))
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    swapped = case_of(SHAPES[0], native_ops())
    expected = swapped.attend((LENGTH - 1, 1))
    # Positions 0 .. 16 and 16 .. 32 trade places: the same set of keys, other lanes.
    swapped.blocks = (swapped.blocks[1], swapped.blocks[0], *swapped.blocks[2:])
    found_swapped = swapped.attend((LENGTH - 1, 1))
    assert not torch.equal(found_swapped, expected)
    torch.testing.assert_close(found_swapped, expected, rtol=1e-5, atol=5e-6)


def test_a_block_of_another_sequence_is_caught() -> None:
    case = case_of(SHAPES[0], native_ops())
    expected = case.attend((LENGTH - 1, 1))
    case.blocks = (case.blocks[5], *case.blocks[1:])
    assert not torch.allclose(case.attend((LENGTH - 1, 1)), expected, rtol=1e-5, atol=5e-6)


def test_no_rows_are_no_rows() -> None:
    case = Sequence(SHAPES[0], 1, native_ops())
    case.ops.write_kv(case.view(), case.key_TGC[:0], case.key_TGC[:0])
    assert case.ops.attention(case.q_THC[:0], case.view(), softmax_scale=1.0).shape == (0, 4, 64)


@pytest.mark.parametrize("context", [1024, pytest.param(16384, marks=pytest.mark.long)])
def test_long_contexts(context: int) -> None:
    heads = Heads(num_heads=4, num_groups=2, key_width=64)
    case = case_of(heads, native_ops(num_threads=2), length=context)
    found = case.attend((context - 1, 1), (context - 5, 4))
    keys, values = (x.double().repeat_interleave(2, dim=1) for x in (case.key_TGC, case.value_TGC))
    weights = torch.einsum("hc,shc->hs", case.q_THC[-1].double(), keys).mul(case.scale).softmax(dim=-1)
    assert (found[0].double() - torch.einsum("hs,shc->hc", weights, values)).abs().max() <= 3e-6
    case.ops = native_ops(num_threads=1)
    assert torch.equal(case.attend((context - 5, 5)), found[[1, 2, 3, 4, 0]])


class Boundary:
    """Arguments of good calls, and the tensors behind them."""

    def __init__(self) -> None:
        self.kernels = native.module().Kernels(LEVELS[-1], 2)
        self.q, self.y = torch.randn(3, 4, 16), torch.zeros(3, 4, 16)
        self.pool = torch.randn(5, 2, 8, 16)
        self.slots = torch.tensor([8, 9, 31])
        self.rows, self.ids = array("q", [0, 2, 7, 0, 2, 2, 1, 3, 2, 1]), array("i", [3, 0, 2])
        pool = {"groups": 2, "kv_block": 8, "is_bfloat16": False, "kind": 0}
        self.attention = pool | {
            "q": self.q.data_ptr(), "q_numbers": 192, "keys": self.pool.data_ptr(),
            "key_bytes": self.pool.nbytes, "values": self.pool.data_ptr(), "value_bytes": self.pool.nbytes,
            "y": self.y.data_ptr(), "y_numbers": 192, "sinks": 0, "rows": self.rows.buffer_info()[0],
            "num_rows": 2, "tables": self.ids.buffer_info()[0], "num_ids": 3, "num_tokens": 3, "heads": 4,
            "key_width": 16, "value_width": 16, "value_row_width": 16, "kv_lanes": 4, "window": 0,
            "is_chunked": False, "scale": 0.25,
        }  # fmt: skip
        self.write = pool | {
            "x": self.q.data_ptr(), "x_numbers": 96, "pool": self.pool.data_ptr(),
            "pool_bytes": self.pool.nbytes, "slots": self.slots.data_ptr(), "num_tokens": 3,
            "fresh": self.slots.data_ptr(), "num_fresh": 0, "width": 16,
        }  # fmt: skip


BAD_ATTENTION: dict[str, tuple[Any, ...]] = {
    "q": (0,), "keys": (0,), "values": (0,), "y": (0,), "rows": (0,), "tables": (0,),
    "q_numbers": (191, -1), "y_numbers": (0,), "key_bytes": (-2048, 5119, 2048), "value_bytes": (1,),
    "num_rows": (-1, 1, 4), "num_ids": (2, -1), "num_tokens": (-1, 2, 4, 2**40), "heads": (0, 3, -4, 2**20),
    "groups": (0, 3, 5, -2), "key_width": (0, 15, 2**20), "value_width": (0, 17),
    "value_row_width": (0, 2**20),
    "kv_block": (0, 6, 4, 2**20), "kv_lanes": (0, 3, 128), "window": (-1, 2**40), "kind": (-1, 4),
}  # fmt: skip
BAD_WRITE: dict[str, tuple[Any, ...]] = {
    "x": (0,), "pool": (0,), "slots": (0,), "x_numbers": (95,), "pool_bytes": (-1, 1024, 5119),
    "num_tokens": (-1, 2, 2**40), "num_fresh": (-1, 4), "groups": (0, 3), "width": (0, 15),
    "kv_block": (0, 7), "kind": (-1, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ATTENTION)
def test_the_boundary_checks_attention(name: str) -> None:
    at = Boundary()
    at.kernels.attention(**at.attention)
    for value in BAD_ATTENTION[name]:
        with pytest.raises(ValueError, match="attention"):
            at.kernels.attention(**(at.attention | {name: value}))


@pytest.mark.parametrize("name", BAD_WRITE)
def test_the_boundary_checks_writes(name: str) -> None:
    at = Boundary()
    at.kernels.write_kv(**at.write)
    for value in BAD_WRITE[name]:
        with pytest.raises(ValueError, match="attention"):
            at.kernels.write_kv(**(at.write | {name: value}))


def test_the_boundary_checks_tables_and_slots() -> None:
    at = Boundary()
    for i, bad in ((0, 5), (0, -1), (2, 70000)):
        good, at.ids[i] = at.ids[i], bad
        with pytest.raises(ValueError, match=f"is {bad}, the pool has 5"):
            at.kernels.attention(**at.attention)
        at.ids[i] = good
    for i, bad in ((0, 1), (1, 0), (1, 4), (2, -1), (2, 900), (3, -1), (3, 2), (4, 1), (5, 1), (8, 3)):
        good, at.rows[i] = at.rows[i], bad
        with pytest.raises(ValueError, match="attention"):
            at.kernels.attention(**at.attention)
        at.rows[i] = good
    at.kernels.attention(**at.attention)
    for bad in (-1, 40, 2**40):
        at.slots[1] = bad
        with pytest.raises(ValueError, match="a slot must be in 0 to 39"):
            at.kernels.write_kv(**at.write)


def test_random_arguments_never_crash() -> None:
    """Whatever is wrong is said; whatever is not is computed inside the tensors, which keep their guards."""
    draw = random.Random(0)
    for _ in range(400):
        at = Boundary()
        good, call = draw.choice([(at.attention, at.kernels.attention), (at.write, at.kernels.write_kv)])
        for table in (at.rows, at.ids):
            if draw.random() < 0.5:
                table[draw.randrange(len(table))] = draw.choice([-2, -1, 0, 1, 2, 3, 7, 2**31 - 1])
        given = dict(good)
        for name in draw.sample(sorted(given), draw.randint(0, 2)):
            # Sizes that describe less memory than there is may be accepted, larger ones never are.
            is_size = isinstance(given[name], int) and not isinstance(given[name], bool)
            if is_size and name != "sinks" and given[name] < 2**32:
                given[name] = draw.choice([-1, 0, 1, 2, 3, given[name] // 2])
        with suppress(ValueError):
            call(**given)


def test_windows_hide_freed_blocks() -> None:
    heads = Heads(num_heads=4, num_groups=2, key_width=32, window=24)
    case = case_of(heads, native_ops())
    expected = case.attend((140, 10), (149, 1))
    case.blocks = (-1,) * 7 + case.blocks[7:]
    assert torch.equal(case.attend((140, 10), (149, 1)), expected)
    with pytest.raises(ValueError, match="block 6 of a sequence is -1"):
        case.attend((130, 1))


def test_places_are_read_once_a_step() -> None:
    case = case_of(SHAPES[0], native_ops())
    view = case.view((7, 1))
    for _ in range(2):
        case.ops.attention(case.q_THC[7:8], view, softmax_scale=1.0)
    assert len(view.places.plans) == 1
    row = KvRow(first_row=0, num_tokens=1, start_idx=7, blocks=(0,))
    other = KvView(key_pool=case.key_pool, value_pool=case.value_pool, places=KvPlaces.of((row,), BLOCK))
    assert other.places.plans == {}
