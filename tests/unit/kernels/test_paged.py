from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import BLOCK, Heads, Sequence, plain_attention, reference_ops

from moesaic.kernels.invariance import ProofTable
from moesaic.kernels.paged import LOWEST, PagedAttention, Parts, merge

OPS = reference_ops()
SHAPES = [
    Heads(num_heads=4, num_groups=4, key_width=32),
    Heads(num_heads=6, num_groups=2, key_width=64),
    Heads(num_heads=8, num_groups=2, key_width=128),
    Heads(num_heads=8, num_groups=1, key_width=96, window=20, has_sinks=True),
    Heads(num_heads=3, num_groups=1, key_width=64, has_sinks=True),
    Heads(num_heads=4, num_groups=4, key_width=32, window=100),
    Heads(num_heads=4, num_groups=2, key_width=32, window=72, is_chunked=True),
    Heads(num_heads=4, num_groups=1, key_width=192, value_width=128),
    Heads(num_heads=2, num_groups=1, key_width=8),
    Heads(num_heads=1, num_groups=1, key_width=4),
]
LENGTH = 330


@pytest.fixture(scope="module")
def cases() -> list[tuple[Sequence, torch.Tensor]]:
    """Each shape with its KV written and its attention computed whole."""
    found = []
    for heads in SHAPES:
        case = Sequence(heads, LENGTH, OPS)
        case.write(0, LENGTH)
        found.append((case, case.attend((0, LENGTH))))
    return found


@pytest.mark.parametrize("i", range(len(SHAPES)))
def test_equals_plain_attention(cases: list[tuple[Sequence, torch.Tensor]], i: int) -> None:
    case, whole = cases[i]
    torch.testing.assert_close(whole.double(), case.exact(), rtol=1e-5, atol=5e-6)


@settings(max_examples=40)
@given(data=st.data(), i=st.integers(0, len(SHAPES) - 1))
def test_bits_do_not_follow_the_step(
    cases: list[tuple[Sequence, torch.Tensor]], data: st.DataObject, i: int
) -> None:
    """Decode and prefill, alone and together, whole and in chunks: the bits of the whole."""
    case, whole = cases[i]
    starts = st.integers(0, LENGTH - 1)
    singles = [(start, 1) for start in data.draw(st.lists(starts, max_size=9))]
    chunks = [
        (start, min(count, LENGTH - start))
        for start, count in data.draw(st.lists(st.tuples(starts, st.integers(2, 150)), max_size=2))
    ]
    parts = data.draw(st.permutations(singles + chunks))
    if parts:
        expected = torch.cat([whole[start : start + count] for start, count in parts])
        assert torch.equal(case.attend(*parts), expected)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 128, 300])
def test_chunks_written_one_after_the_other_equal_the_whole(length: int) -> None:
    heads = Heads(num_heads=4, num_groups=2, key_width=32)
    whole = Sequence(heads, length, OPS)
    whole.write(0, length)
    expected = whole.attend((0, length))
    chunked = Sequence(heads, length, OPS)
    at, found = 0, []
    for size in (7, 1, 1, 50, 16, 64, 200):
        count = min(size, length - at)
        if count:
            chunked.write(at, count)
            found.append(chunked.attend((at, count)))
            at += count
    assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("kv_lanes", [1, 2, 8])
def test_any_number_of_lanes_keeps_the_promise(kv_lanes: int) -> None:
    ops = reference_ops(kv_lanes=kv_lanes)
    case = Sequence(Heads(num_heads=4, num_groups=2, key_width=32, window=70), 200, ops)
    case.write(0, 200)
    whole = case.attend((0, 200))
    torch.testing.assert_close(whole.double(), case.exact(), rtol=1e-5, atol=5e-6)
    assert torch.equal(case.attend((199, 1), (5, 1), (80, 33)), whole[[199, 5, *range(80, 113)]])


def test_lanes_change_bits() -> None:
    """Flipping the field of the numerics does something."""
    heads = Heads(num_heads=4, num_groups=2, key_width=32)
    found = []
    for kv_lanes in (1, 4):
        case = Sequence(heads, 200, reference_ops(kv_lanes=kv_lanes))
        case.write(0, 200)
        found.append(case.attend((0, 200)))
    assert not torch.equal(*found)


@pytest.mark.parametrize("tile_bytes", [1, 50_000])
def test_small_tiles_have_the_same_bits(tile_bytes: int) -> None:
    """Memory bounds decide where scores, keys and values are cut, never what comes out."""
    case = Sequence(Heads(num_heads=8, num_groups=4, key_width=64), 200, OPS)
    case.write(0, 200)
    parts = ((0, 130), (199, 1), (20, 1), (198, 1), (197, 1))
    small = PagedAttention(ProofTable(), kv_block=BLOCK, num_lanes=4, tile_bytes=tile_bytes)
    q_THC = torch.cat([case.q_THC[start : start + count] for start, count in parts])
    found = small(
        q_THC,
        case.view(*parts),
        softmax_scale=case.scale,
        window=None,
        is_chunked=False,
        sinks_H=None,
        value_width=None,
    )
    assert torch.equal(found, case.attend(*parts))


def test_bfloat16_keeps_the_promise() -> None:
    ops = reference_ops("bfloat16")
    case = Sequence(Heads(num_heads=8, num_groups=4, key_width=64), LENGTH, ops, dtype=torch.bfloat16)
    case.write(0, LENGTH)
    whole = case.attend((0, LENGTH))
    assert whole.dtype == torch.bfloat16
    torch.testing.assert_close(whole.double(), case.exact(), rtol=1e-2, atol=1e-2)
    rows = [300, 20, *range(100, 190)]
    assert torch.equal(case.attend((300, 1), (20, 1), (100, 90)), whole[rows])


def test_two_threads_keep_the_promise() -> None:
    ops = reference_ops(num_threads=2)
    try:
        case = Sequence(Heads(num_heads=4, num_groups=2, key_width=64), 150, ops)
        case.write(0, 150)
        whole = case.attend((0, 150))
        assert torch.equal(case.attend((149, 1), (7, 1), (60, 50)), whole[[149, 7, *range(60, 110)]])
    finally:
        torch.set_num_threads(1)


def test_plain_attention_is_not_invariant() -> None:
    """The negative control: textbook attention of the last position, alone and with the others."""
    case = Sequence(Heads(num_heads=4, num_groups=2, key_width=64), 130, OPS)
    alone = plain_attention(case, torch.float32, start=129)
    if torch.equal(alone, plain_attention(case, torch.float32)[129:]):
        pytest.skip("this machine's BLAS is invariant without padding")
    case.write(0, 130)
    assert torch.equal(case.attend((129, 1)), case.attend((0, 130))[129:])


def some_lanes(num_lanes: int) -> Parts:
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, num_lanes, 64)
    return Parts(torch.randn(*shape, 1, generator=generator), torch.rand(*shape, 33, generator=generator))


def lanes_of(parts: Parts, *order: int) -> Parts:
    return Parts(*(tensor[:, :, list(order)] for tensor in parts))


def beside(a: Parts, b: Parts) -> Parts:
    return Parts(*(torch.cat(pair, dim=2) for pair in zip(a, b, strict=True)))


def is_equal(a: Parts, b: Parts) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_lanes_merged_in_order_of_arrival_are_caught() -> None:
    """A subtree may be computed elsewhere and in any order; a left fold, the negative control, may not."""
    lanes = some_lanes(4)
    tree = merge(merge(lanes))
    assert is_equal(merge(beside(merge(lanes_of(lanes, 0, 2)), merge(lanes_of(lanes, 1, 3)))), tree)
    assert is_equal(merge(beside(merge(lanes_of(lanes, 3, 1)), merge(lanes_of(lanes, 2, 0)))), tree)
    folds = []
    for first, *others in ((0, 1, 2, 3), (3, 1, 0, 2)):
        fold = lanes_of(lanes, first)
        for other in others:
            fold = merge(beside(fold, lanes_of(lanes, other)))
        folds.append(fold)
        assert not is_equal(fold, tree)
    assert not is_equal(*folds)


def test_absent_lanes_leave_the_other_as_it_is() -> None:
    lane = some_lanes(1)
    absent = Parts(torch.full_like(lane.peaks, LOWEST), torch.zeros_like(lane.sums))
    assert is_equal(merge(beside(lane, absent)), lane)
    assert is_equal(merge(beside(absent, lane)), lane)
    assert is_equal(merge(beside(absent, absent)), absent)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_a_former_owner_left_does_not_leak(poison: float) -> None:
    heads = Heads(num_heads=4, num_groups=2, key_width=32)
    clean, dirty = Sequence(heads, 40, OPS), Sequence(heads, 40, OPS)
    dirty.key_pool[:-1] = poison
    assert dirty.value_pool is not None
    dirty.value_pool[:-1] = poison
    found = []
    for case in (clean, dirty):
        for at in range(0, 40, 10):
            case.write(at, 10)
        found.append(case.attend((0, 33), (39, 1)))
    assert torch.equal(found[0], found[1])


def test_blocks_that_are_not_cleared_would_leak() -> None:
    """The negative control of the test above: zero times NaN is NaN."""
    case = Sequence(Heads(num_heads=1, num_groups=1, key_width=32), 20, OPS)
    case.write(0, 20)
    assert case.value_pool is not None
    case.value_pool[case.blocks[1], :, 20 % BLOCK :] = float("nan")
    assert torch.isnan(case.attend((19, 1))).any()


def test_freed_blocks_below_a_window_are_not_read() -> None:
    heads = Heads(num_heads=4, num_groups=2, key_width=32, window=24)
    case = Sequence(heads, 150, OPS)
    case.write(0, 150)
    expected = case.attend((140, 10), (149, 1))
    # At position 140 the oldest visible one is 117, in block 7.
    for block in case.blocks[:7]:
        case.key_pool[block] = float("nan")
    case.blocks = (-1,) * 7 + case.blocks[7:]
    assert torch.equal(case.attend((140, 10), (149, 1)), expected)


@pytest.mark.parametrize("start", [143, 144, 150])
def test_freed_blocks_below_a_chunk_are_not_read(start: int) -> None:
    """What a trailing window keeps holds a chunk: the same blocks may be freed."""
    heads = Heads(num_heads=4, num_groups=2, key_width=32, window=24, is_chunked=True)
    case = Sequence(heads, 168, OPS)
    case.write(0, 168)
    count = 168 - start
    expected = case.attend((start, count), (167, 1))
    freed = (start - 24 + 1) // BLOCK
    for block in case.blocks[:freed]:
        case.key_pool[block] = float("nan")
    case.blocks = (-1,) * freed + case.blocks[freed:]
    assert torch.equal(case.attend((start, count), (167, 1)), expected)


def test_a_poisoned_sequence_harms_no_neighbour() -> None:
    """What makes one request fail leaves the bits of the others, in one tile with it, alone."""
    case = Sequence(Heads(num_heads=4, num_groups=2, key_width=32), 100, OPS)
    case.write(0, 100)
    parts = ((40, 1), (60, 1), (10, 9))
    expected = case.attend(*parts)
    case.q_THC[60] = float("nan")
    found = case.attend(*parts)
    assert torch.isnan(found[1]).all()
    assert torch.equal(found[[0, *range(2, 11)]], expected[[0, *range(2, 11)]])


def test_writing_into_a_freed_block_is_a_bug() -> None:
    case = Sequence(Heads(num_heads=1, num_groups=1, key_width=8), 20, OPS)
    case.blocks = (-1, 0)
    with pytest.raises(AssertionError, match="was freed"):
        case.write(0, 3)


def test_running_a_step_twice_gives_the_same_state() -> None:
    case = Sequence(Heads(num_heads=2, num_groups=2, key_width=32), 40, OPS)
    case.write(0, 20)
    case.write(20, 20)
    first = case.attend((20, 20))
    case.write(20, 20)
    assert torch.equal(case.attend((20, 20)), first)


def test_no_rows_are_no_rows() -> None:
    case = Sequence(Heads(num_heads=2, num_groups=2, key_width=32), 1, OPS)
    view = case.view()
    case.ops.write_kv(view, case.key_TGC[:0], case.key_TGC[:0])
    assert case.ops.attention(case.q_THC[:0], view, softmax_scale=1.0).shape == (0, 2, 32)
