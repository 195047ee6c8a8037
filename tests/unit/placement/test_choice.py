"""Which copy takes a token: shares met, nodes first, and keys that stay when a replica joins."""

import numpy as np
import pytest

from moesaic.errors import ConfigError
from moesaic.placement.choice import (
    REPLICA_CHOICES,
    choice_table,
    hash_table,
    least_loaded,
    least_loaded_table,
    near_first,
    replica_of_key,
    replica_table,
)
from moesaic.spec.experts import ExpertPlan


def plan(ranks, experts, shares):
    return ExpertPlan(
        version=0,
        slot_rank=(np.array(ranks),),
        slot_expert=(np.array(experts),),
        slot_slice=(np.zeros(len(ranks), np.int64),),
        slot_share=(np.array(shares, dtype=float),),
    )


def test_three_copies_take_a_third_each_whatever_the_stretch():
    table = choice_table(plan([0, 1, 2, 3], [0, 0, 0, 1], [1 / 3, 1 / 3, 1 / 3, 1]), 0)
    for length in (1, 7, 100, 3001):
        taken = np.bincount(table[0][np.arange(length) % table.shape[1]], minlength=3)
        assert taken.max() - taken.min() <= 1
    assert set(table[1].tolist()) == {3}


def test_weighted_shares_are_met():
    table = choice_table(plan([0, 1, 2], [0, 0, 0], [0.5, 0.375, 0.125]), 0)
    assert np.bincount(table[0]) / table.shape[1] == pytest.approx([0.5, 0.375, 0.125])
    assert np.bincount(table[0][:8]).tolist() == [4, 3, 1]  # spread, not in blocks


def test_own_node_first_and_only_copies_of_the_expert():
    made = plan([0, 2, 3, 1], [0, 0, 1, 1], [0.5, 0.5, 0.5, 0.5])
    assert set(choice_table(made, 0, node_id=0, gpus_per_node=2)[0].tolist()) == {0}
    assert set(choice_table(made, 0, node_id=1, gpus_per_node=2)[0].tolist()) == {1}
    far = plan([2, 3], [0, 0], [0.5, 0.5])
    assert set(choice_table(far, 0, node_id=0, gpus_per_node=2)[0].tolist()) == {0, 1}


def test_an_expert_without_a_slot_has_none():
    assert choice_table(plan([0, 1], [0, 2], [1, 1]), 0)[1].tolist() == [-1]


def test_a_fourth_copy_takes_a_quarter_of_ten_thousand_keys_and_moves_no_other():
    three = hash_table(plan([0, 1, 2, 3], [0, 0, 0, 1], [1, 1, 1, 1]), 0, num_keys=10_000)[0]
    four = hash_table(plan([0, 1, 2, 3], [0, 0, 0, 0], [1, 1, 1, 1]), 0, num_keys=10_000)[0]
    has_moved = three != four
    assert has_moved.mean() == pytest.approx(0.25, abs=0.02)
    assert set(four[has_moved].tolist()) == {3}
    assert np.bincount(four) / 10_000 == pytest.approx([0.25] * 4, abs=0.02)


def test_hashed_keys_meet_shares_and_find_copies_of_two_experts_on_one_rank():
    made = plan([0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1], [0.5, 0.375, 0.125] * 2)
    table = hash_table(made, 0, num_keys=10_000)
    assert np.bincount(table[0]) / 10_000 == pytest.approx([0.5, 0.375, 0.125], abs=0.02)
    assert (table[0] + 3 == table[1]).all()


def test_the_least_loaded_copies_make_ranks_equal():
    """Expert 0 only on rank 0, expert 1 on ranks 0 and 1, expert 2 on all three."""
    made = plan([0, 0, 1, 0, 1, 2], [0, 1, 1, 2, 2, 2], [1, 0.5, 0.5, 1 / 3, 1 / 3, 1 / 3])
    load_E = np.array([400, 300, 500])
    queued = {}
    for choice in ("turns", "least-loaded"):
        table = replica_table(choice, made, 0, load_E)
        part = np.stack([np.bincount(row, minlength=6) / table.shape[1] for row in table])
        queued[choice] = np.bincount(made.slot_rank[0], weights=load_E @ part)
    assert queued["turns"].max() > 700
    assert queued["least-loaded"] == pytest.approx([400, 400, 400], abs=20)  # to 1 / 64 of an expert
    assert (replica_table("least-loaded", made, 0) == choice_table(made, 0)).all(), "until there is a load"
    assert set(least_loaded_table(made, 0, np.array([9, 0, 0]))[1].tolist()) == {1, 2}


@pytest.mark.parametrize("choice", REPLICA_CHOICES)
def test_every_choice_names_copies_of_the_expert_and_those_of_the_own_node_first(choice):
    rng = np.random.default_rng(1)
    experts = np.concatenate([np.arange(8), rng.integers(0, 8, 12)])
    made = plan(rng.integers(0, 4, 20), experts, rng.random(20) + 0.1)
    for node_id in (None, 0, 1):
        table = replica_table(choice, made, 0, np.arange(8), node_id=node_id, gpus_per_node=2)
        assert (experts[table] == np.arange(8)[:, None]).all()
        nodes = made.slot_rank[0] // 2
        for expert, row in enumerate(table):
            if node_id in nodes[experts == expert]:
                assert set(nodes[row].tolist()) == {node_id}


def test_least_loaded_lowers_the_maximum_and_ties_go_low():
    rng = np.random.default_rng(0)
    slots = np.arange(4)
    hashed, chosen = np.zeros(4), np.zeros(4)
    for size in rng.pareto(2.0, 400) + 0.1:
        hashed[rng.integers(4)] += size
        chosen[least_loaded(slots, chosen)] += size
    assert chosen.max() < hashed.max()
    assert least_loaded(np.array([3, 1]), np.zeros(4)) == 1
    with pytest.raises(ConfigError, match="no copy"):
        least_loaded(np.array([], dtype=int), np.zeros(4))


def test_two_levels_keep_traffic_on_the_node_at_any_queue():
    queued, node = np.array([9.0, 0.0, 5.0, 1.0]), np.array([0, 1, 0, 1])
    assert near_first(np.array([0, 1, 2]), queued, node, 0) == 2
    assert near_first(np.array([1, 3]), queued, node, 0) == 1


def test_a_fourth_replica_takes_a_quarter_of_the_keys_and_moves_no_other():
    keys = [f"prefix {i}".encode() for i in range(4000)]
    three = [replica_of_key(key, ["a", "b", "c"]) for key in keys]
    four = [replica_of_key(key, ["a", "b", "c", "d"]) for key in keys]
    moved = [new for old, new in zip(three, four, strict=True) if old != new]
    assert set(moved) == {"d"}
    assert len(moved) / len(keys) == pytest.approx(0.25, abs=0.02)
    assert [three.count(name) / 4000 for name in "abc"] == pytest.approx([1 / 3] * 3, abs=0.03)
    by_modulo = sum(hash(key) % 3 != hash(key) % 4 for key in range(4000)) / 4000
    assert by_modulo == pytest.approx(0.75, abs=0.01)  # what hash % n would move
    with pytest.raises(ConfigError, match="list of names is empty"):
        replica_of_key(b"key", [])


def test_a_prefix_keeps_its_node_so_its_experts_stay_local():
    """Requests of a prefix use like experts: sent by prefix, fewer choices leave the node than at random."""
    rng = np.random.default_rng(0)
    nodes = ["0", "1", "2", "3"]
    prefers = {prefix: rng.choice(64, 8, replace=False) for prefix in range(40)}
    home = {prefix: int(replica_of_key(b"%d" % prefix, nodes)) for prefix in prefers}
    wanted = np.zeros((64, 4))
    for prefix, experts in prefers.items():
        wanted[experts, home[prefix]] += 1
    node_of = wanted.argmax(axis=1)  # experts where their prefixes are
    stay = [np.mean(node_of[experts] == home[prefix]) for prefix, experts in prefers.items()]
    random = [np.mean(node_of[experts] == rng.integers(4)) for experts in prefers.values()]
    assert np.mean(stay) > np.mean(random) + 0.15
