from __future__ import annotations

import pytest
from hash_model import SCOPE, state_group, tokens_group, window_group
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import ConfigError
from moesaic.sched.key import block_keys
from moesaic.sched.ledger import NO_BLOCK, CacheGroup, Grant, KvLedger, cache_groups
from moesaic.spec.model import GqaSpec, LayerSpec, MambaSpec, MlaSpec, ModelSpec, RopeSpec

BLOCK = 4


def make_ledger(groups: list[CacheGroup], *num_blocks: int, has_prefix_cache: bool = True) -> KvLedger:
    return KvLedger(groups, num_blocks, kv_block=BLOCK, scope=SCOPE, has_prefix_cache=has_prefix_cache)


def compute(ledger: KvLedger, request_id: str, tokens: list[int]) -> Grant:
    """Reserve and compute all of `tokens`, block by block, reusing what is there."""
    keys = block_keys(SCOPE, tokens, BLOCK)
    grant = ledger.reserve(request_id, len(tokens), ledger.match(keys, len(tokens)))
    assert grant is not None
    for end in [*range(grant.num_cached + BLOCK, len(tokens), BLOCK), len(tokens)]:
        assert end <= ledger.reach(grant)
        ledger.extend(grant, end)
        ledger.commit(grant, end, keys)
        ledger.check()
    return grant


# -- cache groups --------------------------------------------------------------------------------------


def gqa(window: int | None) -> LayerSpec:
    mixer = GqaSpec(num_heads=4, num_kv_heads=2, head_dim=8, rope=None, softmax_scale=1.0, window=window)
    return LayerSpec(mixer=mixer, ffn=None)


def model(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec(
        model_type="m",
        family="m",
        reader="exact",
        hidden=8,
        vocab=8,
        layers=layers,
        norm_eps=1e-6,
        max_position=64,
        dtype="bfloat16",
        has_tied_head=False,
        weight_format="bfloat16",
    )


def test_layers_with_one_kind_and_window_form_one_group_in_order_of_their_first_layer() -> None:
    mamba = LayerSpec(
        mixer=MambaSpec(num_heads=2, head_dim=4, state_dim=8, num_groups=1, conv_width=4), ffn=None
    )
    spec = model(gqa(8), gqa(None), LayerSpec(mixer=None, ffn=None), mamba, gqa(8), gqa(16), gqa(None))
    groups = cache_groups(spec, "bfloat16", 16)
    assert [(g.kind, g.window, g.layer_idxs) for g in groups] == [
        ("window", 8, (0, 4)),
        ("tokens", None, (1, 6)),
        ("state", None, (3,)),
        ("window", 16, (5,)),
    ]
    assert [g.block_bytes for g in groups] == [2 * 16 * 64, 2 * 16 * 64, 0, 16 * 64]
    assert groups[2].sequence_bytes == 2 * 4 * 8 * 4 + (2 * 4 + 2 * 8) * 3 * 2
    assert [g.block_bytes for g in cache_groups(spec, "float32", 16)] == [4096, 4096, 0, 2048]


def test_latent_attention_counts_its_latent_once() -> None:
    rope = RopeSpec(theta=1e4, dim=64)
    mla = MlaSpec(
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        rope=rope,
        softmax_scale=1.0,
    )
    (group,) = cache_groups(model(*[LayerSpec(mixer=mla, ffn=None)] * 61), "bfloat16", 16)
    assert group.block_bytes == 16 * 61 * 576 * 2  # DeepSeek-V3: 70,272 bytes a token


# -- prefix hits ---------------------------------------------------------------------------------------


@given(length=st.integers(1, 40), data=st.data())
def test_a_change_at_token_t_hits_whole_blocks_before_it(length: int, data: st.DataObject) -> None:
    tokens = list(range(length))
    ledger = make_ledger([tokens_group()], 30)
    ledger.release(compute(ledger, "first", tokens))
    changed_idx = data.draw(st.integers(0, length - 1))
    changed = list(tokens)
    changed[changed_idx] = 99
    match = ledger.match(block_keys(SCOPE, changed, BLOCK), length)
    assert match.num_tokens == min(changed_idx // BLOCK * BLOCK, (length - 1) // BLOCK * BLOCK)


def test_a_hit_leaves_a_token_to_compute() -> None:
    ledger = make_ledger([tokens_group()], 8)
    tokens = list(range(8))
    compute(ledger, "first", tokens)
    keys = block_keys(SCOPE, tokens, BLOCK)
    assert ledger.match(keys, 8).num_tokens == 4
    assert ledger.match(keys, 9).num_tokens == 8


def test_blocks_are_found_when_computed_not_when_planned() -> None:
    ledger = make_ledger([tokens_group()], 8)
    keys = block_keys(SCOPE, range(12), BLOCK)
    grant = ledger.reserve("first", 12)
    assert grant is not None
    ledger.extend(grant, 12)
    assert ledger.match(keys, 12).num_tokens == 0
    ledger.commit(grant, 7, keys)
    assert ledger.match(keys, 12).num_tokens == 4
    ledger.release(grant)
    assert ledger.match(keys, 12).num_tokens == 4


def test_content_computed_twice_keeps_the_first_block() -> None:
    ledger = make_ledger([tokens_group()], 8)
    keys = block_keys(SCOPE, range(8), BLOCK)
    first, second = ledger.reserve("first", 8), ledger.reserve("second", 8)
    assert first is not None
    assert second is not None
    ledger.commit(first, 8, keys)
    ledger.commit(second, 8, keys)
    assert ledger.match(keys, 9).blocks == (tuple(first.tables[0]),)
    ledger.release(second)
    ledger.check()
    assert ledger.usage().idle_bytes == 0
    ledger.release(first)
    assert ledger.usage().idle_bytes == 2 * 64


def test_shared_blocks_live_until_their_last_holder() -> None:
    ledger = make_ledger([tokens_group()], 6)
    tokens = list(range(12))
    first = compute(ledger, "first", tokens)
    second = compute(ledger, "second", tokens)
    assert second.num_cached == 8
    assert second.tables[0][:2] == first.tables[0][:2]
    ledger.release(first)
    ledger.check()
    third = compute(ledger, "third", [50] * 8)  # takes the two that are free or idle
    assert not set(third.tables[0]) & set(second.tables[0])
    ledger.check()


def test_the_end_of_a_chain_is_evicted_before_its_start() -> None:
    ledger = make_ledger([tokens_group()], 4)
    tokens = list(range(16))
    ledger.release(compute(ledger, "first", tokens))
    compute(ledger, "other", [50] * 4)
    assert ledger.match(block_keys(SCOPE, tokens, BLOCK), 99).num_tokens == 12


def test_what_went_wrong_is_not_kept() -> None:
    ledger = make_ledger([tokens_group()], 8)
    grant = compute(ledger, "first", list(range(8)))
    ledger.release(grant, is_suspect=True)
    ledger.check()
    assert ledger.match(block_keys(SCOPE, range(8), BLOCK), 9).num_tokens == 0
    assert ledger.usage().idle_bytes == 0


def test_without_a_prefix_cache_nothing_is_found() -> None:
    ledger = make_ledger([tokens_group()], 8, has_prefix_cache=False)
    ledger.release(compute(ledger, "first", list(range(8))))
    assert ledger.match(block_keys(SCOPE, range(8), BLOCK), 9).num_tokens == 0
    assert ledger.usage().free_bytes == ledger.usage().total_bytes


# -- windows and states --------------------------------------------------------------------------------


def test_a_window_group_frees_what_no_later_position_sees() -> None:
    ledger = make_ledger([tokens_group(), window_group(5)], 20, 6)
    grant = ledger.reserve("first", 40)
    assert grant is not None
    for end in range(1, 41):
        ledger.extend(grant, end)
        ledger.commit(grant, end, block_keys(SCOPE, range(end), BLOCK))
        ledger.check()
        live = [idx for idx, block_id in enumerate(grant.blocks(end, BLOCK)[1]) if block_id != NO_BLOCK]
        # The next position, `end`, sees end - 4 .. end.
        assert live == list(range(max(0, end - 4) // BLOCK, -(-end // BLOCK)))
    assert len(grant.tables[0]) == 10


def test_one_request_of_any_length_runs_in_the_fewest_blocks_of_a_window() -> None:
    for window in range(1, 20):
        group = window_group(window)
        fewest = group.min_units(BLOCK)
        with pytest.raises(ConfigError, match="at least"):
            make_ledger([group], fewest - 1)
        ledger = make_ledger([group], fewest)
        assert ledger.capacity_tokens is None
        grant = ledger.reserve("first", 60)
        assert grant is not None
        used = 0
        for end in range(1, 61):
            assert ledger.reach(grant) >= end, (window, end)
            ledger.extend(grant, end)
            used = max(used, ledger.num_used)
            ledger.commit(grant, end, block_keys(SCOPE, range(end), BLOCK))
        assert used == fewest


def test_a_window_group_matches_where_it_holds_what_the_next_position_sees() -> None:
    tokens = list(range(24))
    keys = block_keys(SCOPE, tokens, BLOCK)
    ledger = make_ledger([tokens_group(), window_group(5)], 20, 12)
    ledger.release(compute(ledger, "first", tokens))
    whole = ledger.match(keys, 25)
    assert whole.num_tokens == 24
    assert whole.blocks[1][:5] == (NO_BLOCK,) * 5  # position 24 sees 20 .. 24
    assert whole.blocks[1][5] != NO_BLOCK
    lost = whole.blocks[1][5]
    ledger._pools[1].forget(lost)
    ledger._pools[1]._idle.pop(lost)
    ledger._pools[1]._free.append(lost)
    assert ledger.match(keys, 25).num_tokens == 20
    ledger.check()


def test_the_match_is_the_least_over_the_groups() -> None:
    tokens = list(range(24))
    ledger = make_ledger([window_group(9), tokens_group(), window_group(3)], 12, 6, 12)
    ledger.release(compute(ledger, "first", tokens))
    other = ledger.reserve("other", 8)  # takes two blocks, and with them the end of the chain of tokens
    assert other is not None
    match = ledger.match(block_keys(SCOPE, tokens, BLOCK), 25)
    assert match.num_tokens == 16
    grant = ledger.reserve("again", 24, match)
    assert grant is None  # 16 tokens of 24 are there, two blocks are missing
    ledger.release(other)
    grant = compute(ledger, "again", tokens)
    assert grant.num_cached == 16
    ledger.check()


def test_a_state_has_two_slots_and_matches_nothing() -> None:
    ledger = make_ledger([tokens_group(), state_group()], 20, 4)
    first = compute(ledger, "first", list(range(8)))
    second = compute(ledger, "second", list(range(8)))
    assert second.num_cached == 0
    assert len({*first.state_slots, *second.state_slots}) == 4
    assert ledger.reserve("third", 4) is None
    ledger.release(first)
    assert ledger.reserve("third", 4) is not None
    ledger.check()


# -- granting and accounting ---------------------------------------------------------------------------


def test_a_refused_reservation_changes_nothing() -> None:
    ledger = make_ledger([tokens_group(), window_group(8)], 6, 8)
    tokens = list(range(16))
    ledger.release(compute(ledger, "first", tokens))
    held = ledger.reserve("other", 4)
    assert held is not None
    before = ledger.usage()
    keys = block_keys(SCOPE, [*tokens, *range(50, 58)], BLOCK)
    assert ledger.reserve("big", 24, ledger.match(keys, 24)) is None
    assert ledger.usage() == before
    ledger.check()


def test_spare_blocks_are_left_to_others() -> None:
    ledger = make_ledger([tokens_group()], 4)
    assert ledger.reserve("first", 12, num_spare=2) is None
    assert ledger.reserve("first", 12, num_spare=1) is not None


def test_releasing_twice_is_an_internal_error() -> None:
    ledger = make_ledger([tokens_group()], 4)
    grant = ledger.reserve("first", 4)
    assert grant is not None
    ledger.release(grant)
    with pytest.raises(AssertionError, match="released twice"):
        ledger.release(grant)
    ledger.reserve("second", 4)
    with pytest.raises(AssertionError, match="already holds"):
        ledger.reserve("second", 4)


def test_bytes_per_request_and_group_sum_to_the_pools() -> None:
    ledger = make_ledger([tokens_group(), window_group(4)], 12, 12)
    first = compute(ledger, "first", list(range(12)))
    second = compute(ledger, "second", [*range(8), 60, 61])
    assert second.num_cached == 8
    usage = ledger.usage()
    assert usage.held_bytes["first"] == (3 * 64, 1 * 32)
    assert usage.held_bytes["second"][0] == 3 * 64
    assert usage.shared_bytes >= 2 * 64
    own = sum(map(sum, usage.own_bytes.values()))
    assert own + usage.shared_bytes + usage.idle_bytes + usage.free_bytes == usage.total_bytes == 12 * 96
    for grant in (first, second):
        ledger.release(grant)
    usage = ledger.usage()
    assert (usage.own_bytes, usage.shared_bytes) == ({}, 0)
    assert usage.idle_bytes + usage.free_bytes == usage.total_bytes


def test_pool_sizes_must_match_the_groups() -> None:
    with pytest.raises(ConfigError, match="as many pool sizes"):
        make_ledger([tokens_group()], 4, 4)
    with pytest.raises(ConfigError, match="state cache of layer 2"):
        make_ledger([tokens_group(), state_group()], 4, 1)


def test_a_twin_shares_nothing() -> None:
    ledger = make_ledger([tokens_group()], 4)
    compute(ledger, "first", list(range(8)))
    twin = ledger.twin()
    assert twin.match(block_keys(SCOPE, range(8), BLOCK), 8).num_tokens == 0
    assert (twin.num_used, twin.num_total, ledger.num_used) == (0, 4, 2)
