"""From one expert plan to another as the controller sees it: stages, answers, loads, ranks that are gone."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import pytest
from fakes import tiny_spec

from moesaic.engine.launchers.launcher import Launcher, Member
from moesaic.engine.rank import Adopt, Adopted
from moesaic.engine.ranks import Ranks
from moesaic.engine.rebalance import LOAD_STEPS, Rebalance
from moesaic.errors import HostMemoryShort, PeerLost, SwapRunning
from moesaic.placement.choice import ReplicaChoice
from moesaic.spec.experts import ExpertLoad, ExpertPlan, contiguous_plan

START = contiguous_plan((4, 4), 2)
TURNED = replace(START, version=9, slot_rank=tuple(1 - ranks for ranks in START.slot_rank))


def make(
    *,
    available: int = 10**6,
    stage_bytes: int = 1,
    choice: ReplicaChoice = "turns",
    start: ExpertPlan = START,
) -> Rebalance:
    return Rebalance(
        start,
        tiny_spec(40),
        num_ranks=2,
        expert_bytes=(100, 100),
        available_bytes=lambda: available,
        replica_choice=choice,
        stage_bytes=stage_bytes,
    )


def test_stages_come_in_turn_and_the_last_one_answers() -> None:
    rebalance = make()
    answer = rebalance.ask(TURNED, now_s=1.0)
    for version in (1, 2):
        assert not answer.done()
        stage = rebalance.next_stage()
        assert stage is not None
        assert stage.version == version
        rebalance.done(stage, 400, now_s=3.5)
        assert rebalance.plan is stage
    assert rebalance.next_stage() is None
    told = answer.result(0)
    assert (told.version, told.num_stages, told.moved_bytes, told.seconds) == (2, 2, 800, 2.5)
    assert [rank.tolist() for rank in rebalance.plan.slot_rank] == [[1, 1, 0, 0]] * 2
    assert (rebalance.grown_bytes, rebalance.num_held(0)) == (0, 4)


def test_who_waits_for_a_plan_hears_that_the_ranks_are_gone() -> None:
    rebalance, lost = make(), PeerLost(rank=1, layer_idx=2, stage="move", seconds=1.0)
    answer = rebalance.ask(TURNED, 0.0)
    with pytest.raises(SwapRunning, match="2 stages of another plan are left to do, the next has version 1"):
        rebalance.ask(START, 0.0)
    rebalance.fail(lost)
    with pytest.raises(PeerLost, match="rank 1"):
        answer.result(0)


def test_room_is_reckoned_at_the_fullest_moment() -> None:
    """All four experts of a layer on both ranks: 400 bytes more a layer; the second one is filled last."""
    both = replace(
        contiguous_plan((8, 8), 2),
        slot_expert=(np.tile(np.arange(4), 2),) * 2,
        slot_share=(np.full(8, 0.5),) * 2,
    )
    # 400 that the first layer grew by, 800 of the second one's copies, 4 blobs sent, on the way and received.
    need = 400 + 800 + 3 * 400
    make(available=need).ask(both, 0.0)
    with pytest.raises(HostMemoryShort, match=r"experts grow from 800 B to 1\.60 kB over all ranks"):
        make(available=need - 1).ask(both, 0.0)


def test_loads_reach_ranks_that_go_by_them_now_and_then() -> None:
    load = ExpertLoad(
        counts=(np.array([1, 2, 3, 4]), np.array([4, 3, 2, 1])),
        phase="decode",
        num_tokens=5,
        num_steps=1,
        since_s=0.0,
        until_s=1.0,
        plan_version=0,
        source="engine",
    )
    rebalance = make(choice="least-loaded")
    found = [rebalance.take_loads([load]) for _ in range(2 * LOAD_STEPS)]
    assert [at for at, loads in enumerate(found, start=1) if loads is not None] == [
        LOAD_STEPS,
        2 * LOAD_STEPS,
    ]
    for loads in found[LOAD_STEPS - 1 :: LOAD_STEPS]:
        assert loads is not None
        assert loads[0].tolist() == [LOAD_STEPS * count for count in (1, 2, 3, 4)]
    assert load.counts[0].tolist() == [1, 2, 3, 4]
    assert all(make().take_loads([load]) is None for _ in range(2 * LOAD_STEPS))


class Given(Launcher):
    """Ranks whose far ends are the test's."""

    def __init__(self, pipes: list[Connection]) -> None:
        self.pipes = pipes

    def start(self, num_ranks: int) -> list[Member]:
        return [Member(pipe=pipe, process=None) for pipe in self.pipes]

    def close(self) -> None:
        pass


def test_ranks_that_are_gone_or_lost_another_are_named() -> None:
    pairs = [Pipe() for _ in range(2)]
    ranks = Ranks(Given([pair[0] for pair in pairs]), 2)
    for _, far in pairs:
        far.send(Adopted(sent_bytes=7))
    assert ranks.adopt(TURNED) == 14
    for _, far in pairs:
        assert isinstance(far.recv(), Adopt)
    lost = PeerLost(rank=1, layer_idx=4, stage="move", seconds=2.0)
    pairs[0][1].send(Adopted(sent_bytes=0, lost=lost))
    pairs[1][1].close()
    with pytest.raises(PeerLost, match=r"rank 1 .*layer 4, stage move"):
        ranks.adopt(TURNED)
    pairs[0][1].close()
    with pytest.raises(PeerLost, match=r"rank . has ended .*stage move"):
        ranks.adopt(TURNED)
    with pytest.raises(PeerLost, match=r"rank . has ended"):
        ranks.forget(())  # nothing is under way, and still it shows
    ranks.close()
