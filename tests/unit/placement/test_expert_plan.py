"""Plans from placements and from one plan to the next; loads as arrays; the trace whose topics drift."""

import numpy as np
import pytest

from moesaic.errors import ConfigError
from moesaic.placement.contiguous import contiguous
from moesaic.placement.grid import SlotGrid
from moesaic.placement.load import drifting_loads, load_array, share_variation, stacked
from moesaic.placement.local_search import local_search
from moesaic.placement.lpt import lpt
from moesaic.placement.plan import (
    fetched,
    local_share,
    placement_of,
    plan_of,
    relabel,
    spread_over_nodes,
    stages,
    without,
)
from moesaic.placement.shares import even_shares
from moesaic.placement.slots import Placement, balancedness, num_moves
from moesaic.spec.deployment import check_plan
from moesaic.spec.experts import ExpertLoad, ExpertPlan

LOAD = np.random.default_rng(0).pareto(1.0, (4, 12)) + 0.1
GRID = SlotGrid(num_experts=12, num_gpus=4, num_slots=16)


def plan(placement):
    return plan_of(placement, even_shares(placement, 12))


def test_a_plan_is_a_placement_and_back():
    placement = lpt(LOAD, GRID)
    made = plan(placement)
    check_plan(made, num_ranks=4)
    assert np.array_equal(placement_of(made).ids_LGC, placement.ids_LGC)
    for ids, share in zip(made.slot_expert, made.slot_share, strict=True):
        assert np.bincount(ids, weights=share) == pytest.approx(1.0)
    sliced = Placement(ids_LGC=np.arange(24).reshape(1, 4, 6), num_slices=2)
    there = plan_of(sliced, np.ones((1, 4, 6)))
    assert there.slot_slice[0].tolist() == [0, 1] * 12
    assert np.array_equal(placement_of(there).ids_LGC, sliced.ids_LGC)


def test_a_plan_with_uneven_ranks_is_no_placement():
    made = ExpertPlan(
        version=0,
        slot_rank=(np.array([0, 0, 1]),),
        slot_expert=(np.arange(3),),
        slot_slice=(np.zeros(3, np.int64),),
        slot_share=(np.ones(3),),
    )
    with pytest.raises(ConfigError, match="layer 0 of the plan has 1 to 2 slots"):
        placement_of(made)


def test_relabelling_only_saves_moves():
    start = contiguous(GRID, 4).ids_LGC
    scratch = local_search(LOAD, GRID)
    named = relabel(scratch, start)
    assert num_moves(start, named.ids_LGC).sum() < num_moves(start, scratch.ids_LGC).sum()
    assert np.sort(named.gpu_load(LOAD)) == pytest.approx(np.sort(scratch.gpu_load(LOAD)))
    assert num_moves(start, start).sum() == 0


def test_spreading_over_nodes_keeps_more_choices_local():
    numbers = SlotGrid(num_experts=12, num_gpus=4, num_slots=20, num_nodes=2)
    placement = local_search(LOAD, numbers)
    near = spread_over_nodes(placement, LOAD, 2)
    assert np.sort(near.gpu_load(LOAD)) == pytest.approx(np.sort(placement.gpu_load(LOAD)))
    worst = min(
        local_share(Placement(ids_LGC=placement.ids_LGC[:, list(order)]), LOAD, 2)
        for order in ([0, 1, 2, 3], [0, 2, 1, 3], [0, 3, 1, 2])
    )
    assert local_share(near, LOAD, 2) > worst
    assert local_share(Placement(ids_LGC=np.tile(np.arange(12), (4, 2, 1))), LOAD, 2) == 1.0


def test_stages_lead_to_the_target_in_whole_layers_within_the_budget():
    start, target = plan(contiguous(GRID, 4)), plan(local_search(LOAD, GRID))
    sizes = dict.fromkeys(range(4), 10)
    layers = [len(keys) for keys in fetched(start, target)]
    made = list(stages(start, target, 10 * max(layers), sizes))
    assert [one.version for one in made] == list(range(1, len(made) + 1))
    before = start
    for after in made:
        changed = [i for i in range(4) if not np.array_equal(before.slot_expert[i], after.slot_expert[i])]
        assert sum(layers[i] for i in changed) <= max(layers)
        for i in changed:
            assert np.array_equal(after.slot_expert[i], target.slot_expert[i])
        before = after
    assert all(np.array_equal(*pair) for pair in zip(before.slot_expert, target.slot_expert, strict=True))
    assert len(list(stages(start, target, 10**9, sizes))) == 1
    assert len(list(stages(start, target, 1, sizes))) == sum(size > 0 for size in layers)
    with pytest.raises(ConfigError, match="budget_bytes must be above 0"):
        next(stages(start, target, 0, sizes))


def test_a_lost_rank_leaves_shares_whole_and_names_orphans():
    made = plan(local_search(LOAD, GRID))
    left, orphans = without(made, 2)
    assert left.version == made.version + 1
    for layer in range(4):
        assert 2 not in left.slot_rank[layer]
        ids, shares = left.slot_expert[layer], left.slot_share[layer]
        assert np.bincount(ids, weights=shares)[np.unique(ids)] == pytest.approx(1.0)
        gone = sorted(set(range(12)) - set(ids.tolist()))
        assert gone == [key.logical_id for key in orphans if key.layer_idx == layer]
    assert orphans
    with pytest.raises(ConfigError, match="rank 9 has no slot"):
        without(made, 9)


# --- loads --------------------------------------------------------------------------------------------------


def load(*rows, source="a.json"):
    return ExpertLoad(
        counts=tuple(np.array(row) for row in rows),
        phase="decode",
        num_tokens=1,
        num_steps=1,
        since_s=0.0,
        until_s=1.0,
        plan_version=0,
        source=source,
    )


def test_loads_are_arrays_or_say_why_not():
    assert stacked([load([1, 2], [3, 4]), load([5, 6], [7, 8])]).shape == (2, 2, 2)
    with pytest.raises(ConfigError, match=r"b.json has 1 sparse layers of 2 experts, a.json has 2 of 2"):
        stacked([load([1, 2], [3, 4]), load([5, 6], source="b.json")])
    with pytest.raises(ConfigError, match=r"expert 1 of sparse layer 0 has the count -2"):
        load_array(load([1, -2]))
    with pytest.raises(ConfigError, match="the count nan"):
        load_array(load([1.0, float("nan")]))
    with pytest.raises(ConfigError, match=r"as many experts in every sparse layer; it has \[1, 2\]"):
        load_array(load([1], [1, 2]))


def test_prefill_batches_differ_far_more_than_decode_batches_of_as_many_tokens():
    def variation(requests, tokens):
        rng = np.random.default_rng(3)
        counts = drifting_loads(
            rng,
            num_experts=64,
            experts_per_token=8,
            num_topics=16,
            requests=[requests] * 60,
            tokens_per_request=tokens,
        )
        assert counts.sum(axis=1).tolist() == [requests * tokens * 8] * 60
        return share_variation(counts)

    decode, prefill = variation(4000, 1), variation(4, 1000)
    assert decode < 0.2
    assert prefill > 3 * decode
    with pytest.raises(ConfigError, match="needs two of them, got 1"):
        share_variation(np.ones((1, 4)))


def test_drifting_topics_unbalance_a_placement_that_stays():
    counts = drifting_loads(
        np.random.default_rng(0),
        num_experts=32,
        experts_per_token=4,
        num_topics=8,
        requests=[200] * 9,
        tokens_per_request=50,
        turn_per_step=0.5,
    )
    numbers = SlotGrid(num_experts=32, num_gpus=8, num_slots=40)
    first = local_search(counts[:1], numbers)
    even = [float(balancedness(first.gpu_load(row[None])).mean()) for row in counts]
    assert even[0] > 0.99
    assert even[-1] < 0.8
    assert float(balancedness(local_search(counts[-1:], numbers).gpu_load(counts[-1:])).mean()) > 0.99
