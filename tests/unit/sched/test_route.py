"""Routing policies as functions, and a directory that is what the ledgers' reports make it."""

from __future__ import annotations

import pytest
from hash_model import tokens_group
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import ConfigError
from moesaic.sched.key import KvKeyScope, block_keys
from moesaic.sched.ledger import KvLedger
from moesaic.sched.route import EngineView, KvDirectory, choose
from moesaic.spec.deployment import KvAffinity, LoadAffinity, PrefixAffinity, RoundRobin

SCOPE = KvKeyScope(model_digest="m", numerics_digest="n", tokenizer_digest="t", positions="p")
KEYS = block_keys(SCOPE, tuple(range(12)), 4)


def chosen(policy, views, *, turn=0, keys=KEYS, prompt_tokens=100):
    return choose(policy, views, turn=turn, keys=keys, prompt_tokens=prompt_tokens)


def test_round_robin_takes_turns() -> None:
    views = [EngineView(hit_tokens=100)] + [EngineView()] * 2
    assert [chosen(RoundRobin(), views, turn=turn) for turn in range(6)] == [0, 1, 2, 0, 1, 2]


def test_prefix_affinity_follows_the_first_blocks_alone() -> None:
    views = [EngineView()] * 5
    same = (*KEYS[:2], b"other")
    policy = PrefixAffinity(num_blocks=2)
    assert chosen(policy, views) == chosen(policy, views, keys=same, turn=3)
    many = {chosen(policy, views, keys=block_keys(SCOPE, (seed,) * 8, 4)) for seed in range(60)}
    assert many == set(range(5))
    assert chosen(policy, views, keys=(), turn=7) == 2  # no full block: nothing to be near to


def test_a_fourth_engine_takes_a_quarter_of_the_prefixes_and_moves_no_other() -> None:
    prefixes = [block_keys(SCOPE, (seed,) * 8, 4) for seed in range(2000)]
    policy = PrefixAffinity(num_blocks=2)
    before, after = (
        [chosen(policy, [EngineView()] * count, keys=keys) for keys in prefixes] for count in (3, 4)
    )
    moved = [b for a, b in zip(before, after, strict=True) if a != b]
    assert set(moved) == {3}
    assert len(moved) / len(prefixes) == pytest.approx(0.25, abs=0.03)


def test_kv_affinity_goes_where_most_is_cached_and_few_hits_are_none() -> None:
    views = [
        EngineView(pending_tokens=900, hit_tokens=60),
        EngineView(hit_tokens=40),
        EngineView(hit_tokens=10),
    ]
    assert chosen(KvAffinity(), views) == 0
    assert chosen(KvAffinity(least_hit=0.7), views) == 1  # no hit counts: the least loaded, first of equals
    # A system prompt that all share sends everything to the engine that had it first.
    shared = [EngineView(pending_tokens=10**6, hit_tokens=5), EngineView()]
    assert chosen(KvAffinity(least_hit=0.0), shared) == 0
    assert chosen(KvAffinity(), shared) == 1


def test_load_and_affinity_weigh_tokens_cached_against_tokens_waiting() -> None:
    views = [EngineView(pending_tokens=130, hit_tokens=60), EngineView()]
    assert chosen(LoadAffinity(hit_weight=1.0), views) == 1
    assert chosen(LoadAffinity(hit_weight=3.0), views) == 0
    assert chosen(LoadAffinity(hit_weight=0.0), views) == 1
    assert chosen(LoadAffinity(load_weight=0.0), views) == 0
    assert chosen(LoadAffinity(), [EngineView(num_running=3), EngineView(num_running=1)]) == 1


def test_a_fleet_without_an_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one engine"):
        chosen(RoundRobin(), [])


def test_a_directory_counts_leading_blocks_and_forgets() -> None:
    directory = KvDirectory(3)
    directory.report(0, [(KEYS[0], True), (KEYS[1], True), (KEYS[2], True)])
    directory.report(1, [(KEYS[0], True), (KEYS[2], True)])
    assert directory.hits(KEYS) == [3, 1, 0]
    directory.report(0, [(KEYS[1], False)])
    assert directory.hits(KEYS) == [1, 1, 0]
    directory.forget(0)
    assert directory.hits(KEYS) == [0, 1, 0]
    assert directory.hits(()) == [0, 0, 0]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 14), st.booleans()), max_size=30))
def test_the_changes_of_a_ledger_are_what_it_holds(script) -> None:
    """Whatever is reserved, committed and released, the reports add up to what a match would find."""
    ledger = KvLedger([tokens_group()], [7], kv_block=4, scope=SCOPE)
    ledger.watch()
    directory, grants = KvDirectory(1), []
    for number, (seed, length, ends) in enumerate(script):
        tokens = (seed,) * length
        keys = block_keys(SCOPE, tokens, 4)
        grant = ledger.reserve(f"r{number}", length, ledger.match(keys, length))
        if grant is not None:
            ledger.commit(grant, length, keys)
            grants.append(grant)
        while grants and (ends or grant is None):
            ledger.release(grants.pop(0))
        directory.report(0, ledger.take_changes())
    for seed in range(4):
        keys = block_keys(SCOPE, (seed,) * 57, 4)
        assert directory.hits(keys) == [ledger.match(keys, 57).num_tokens // 4]
