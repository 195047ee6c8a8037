from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kv_cases import reference_ops

from moesaic.errors import ConfigError, UnsupportedModelError
from moesaic.kernels.kv_view import KvView
from moesaic.kernels.matmul import noise
from moesaic.kernels.state_view import StateView
from moesaic.kv.pool import BatchLayout, KvPool
from moesaic.sched.ledger import cache_groups
from moesaic.sched.step import RowPlan
from moesaic.spec.model import GqaSpec, LayerSpec, LinearSpec, MambaSpec, MlaSpec, ModelSpec, RopeSpec
from moesaic.spec.numerics import preset

NUMERICS = preset("portable", dtype="bfloat16")
ROPE = RopeSpec(theta=1e4, dim=8)


def gqa(**changes: Any) -> GqaSpec:
    return GqaSpec(num_heads=4, num_kv_heads=2, head_dim=8, rope=ROPE, softmax_scale=0.3, **changes)


MLA = MlaSpec(
    num_heads=4,
    q_lora_rank=None,
    kv_lora_rank=24,
    nope_dim=8,
    rope_dim=8,
    value_dim=8,
    rope=ROPE,
    softmax_scale=0.3,
)


def model(*mixers: Any) -> ModelSpec:
    return ModelSpec(
        model_type="test",
        family="test",
        reader="exact",
        hidden=32,
        vocab=64,
        layers=tuple(LayerSpec(mixer=mixer, ffn=None) for mixer in mixers),
        norm_eps=1e-6,
        max_position=512,
        dtype="bfloat16",
        has_tied_head=True,
        weight_format="bfloat16",
    )


def row(start: int, count: int, *blocks: tuple[int, ...]) -> RowPlan:
    return RowPlan(
        request_id=f"r{start}",
        start_idx=start,
        num_tokens=count,
        is_sampled=True,
        token_ids=tuple(range(count)),
        blocks=blocks,
        state_from=None,
        state_to=None,
    )


def test_bytes_are_the_ledgers_and_one_block_more() -> None:
    spec = model(gqa(), gqa(window=20), MLA, gqa())
    pool = KvPool(spec, NUMERICS, (5, 3))
    assert pool.groups == cache_groups(spec, "bfloat16", NUMERICS.kv_block)
    expected = sum((count + 1) * group.block_bytes for count, group in zip((5, 3), pool.groups, strict=True))
    assert pool.num_bytes == expected


def test_layers_of_a_group_share_places_and_no_memory() -> None:
    pool = KvPool(model(gqa(), gqa(window=20), gqa()), NUMERICS, (5, 3))
    layout = BatchLayout.of((row(0, 18, (4, 1), (2, 0)), row(33, 1, (0, 2, 3), (-1, -1, 1))), pool)
    assert layout.positions_T.tolist() == [*range(18), 33]
    first, windowed, last = (pool.view(i, layout) for i in range(3))
    assert first.places is last.places
    assert first.places is not windowed.places
    assert first.key_pool.data_ptr() != last.key_pool.data_ptr()
    assert first.slot_T.tolist() == [*range(64, 80), 16, 17, 49]
    assert windowed.slot_T.tolist() == [*range(32, 48), 0, 1, 17]
    assert first.places.fresh_blocks.tolist() == [4, 1]
    assert first.key_pool.dtype == torch.bfloat16


def test_latents_are_keys_without_values() -> None:
    pool = KvPool(model(MLA), NUMERICS, (2,))
    view = pool.view(0, BatchLayout.of((row(0, 1, (0,)),), pool))
    assert view.key_pool.shape == (3, 1, NUMERICS.kv_block, 32)
    assert view.value_pool is None


def test_what_is_written_is_read_in_the_pools_format() -> None:
    pool, ops = KvPool(model(gqa()), NUMERICS, (3,)), reference_ops("bfloat16")
    view = pool.view(0, BatchLayout.of((row(0, 18, (2, 0)),), pool))
    key_TGC, value_TGC = noise((18, 2, 8)), noise((18, 2, 8), seed=1)
    ops.write_kv(view, key_TGC, value_TGC)
    for tensor, new_TGC in ((view.key_pool, key_TGC), (view.value_pool, value_TGC)):
        assert tensor is not None
        stored = torch.cat((tensor[2], tensor[0]), dim=1)[:, :18].transpose(0, 1)
        assert torch.equal(stored, new_TGC.bfloat16())
        assert not tensor[-1].any(), "the block that stands in for missing ones stays zero"
        assert not tensor[0][:, 2:].any()


def test_an_idle_rank_has_an_empty_layout() -> None:
    pool = KvPool(model(gqa()), NUMERICS, (1,))
    layout = BatchLayout.of((), pool)
    assert layout.positions_T.shape == (0,)
    assert pool.view(0, layout).rows == ()


LINEAR = LinearSpec(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, conv_width=4)


def state_row(start: int, count: int, slots: tuple[int | None, int | None], *blocks: int) -> RowPlan:
    return replace(row(start, count, (), blocks), state_from=slots[0], state_to=slots[1])


def test_states_lie_in_slots_of_the_ledgers_bytes() -> None:
    pool = KvPool(model(LINEAR, gqa(), LINEAR), NUMERICS, (6, 3))
    states, tokens = pool.groups
    assert states.sequence_bytes == 2 * (4 * 8 * 6 * 4 + (2 * 2 * 8 + 4 * 6) * 3 * 2)
    assert pool.num_bytes == 6 * states.sequence_bytes + 4 * tokens.block_bytes
    layout = BatchLayout.of((state_row(0, 5, (None, 4), 1), state_row(7, 1, (2, 0), 2)), pool)
    first, keys, last = (pool.view(i, layout) for i in range(3))
    assert isinstance(first, StateView)
    assert isinstance(last, StateView)
    assert first.places is last.places
    assert first.states.data_ptr() != last.states.data_ptr()
    assert (first.states.shape, first.states.dtype) == ((6, 4, 8, 6), torch.float32)
    assert (first.tails.shape, first.tails.dtype) == ((6, 3, 56), torch.bfloat16)
    assert [(r.first_row, r.num_tokens, r.slot_from, r.slot_to) for r in first.places.rows] == [
        (0, 5, None, 4),
        (5, 1, 2, 0),
    ]
    assert isinstance(keys, KvView)
    assert keys.slot_T.tolist() == [16, 17, 18, 19, 20, 39]


@pytest.mark.parametrize(
    ("slots", "start", "rule"),
    [
        ((None, None), 0, "has no slot for its state"),
        ((1, 0), 0, "a state is read where a sequence goes on, and only there"),
        ((None, 0), 3, "a state is read where a sequence goes on, and only there"),
        ((2, 2), 3, "a state is never updated in place"),
    ],
)
def test_a_plan_with_wrong_slots_is_an_internal_error(
    slots: tuple[int | None, int | None], start: int, rule: str
) -> None:
    pool = KvPool(model(LINEAR, gqa()), NUMERICS, (6, 3))
    with pytest.raises(AssertionError, match=rule):
        BatchLayout.of((state_row(start, 1, slots, 0),), pool)


def test_states_of_a_mixer_that_is_not_run_are_refused() -> None:
    mamba = MambaSpec(num_heads=2, head_dim=8, state_dim=4, num_groups=1, conv_width=4)
    with pytest.raises(UnsupportedModelError, match="Mamba-2 mixers keep states"):
        KvPool(model(gqa(), mamba), NUMERICS, (1, 1))


@pytest.mark.parametrize("num_blocks", [(), (1, 1), (0,)])
def test_counts_must_fit_the_groups(num_blocks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="one count of at least 1 for each of 1 cache groups"):
        KvPool(model(gqa()), NUMERICS, num_blocks)
