"""What ranks did: totals since the start, skew of the last minute, two factors kept apart."""

import pytest

from moesaic.engine.rank_window import RankWindow
from moesaic.sched.step import RankStep


def step(rank: int, *, jobs: int = 0, sent: int = 0, compute_s: float = 0.0) -> RankStep:
    """Of two ranks, each sending to the other."""
    return RankStep(
        rank=rank,
        num_jobs=jobs,
        sent_bytes=(0, sent) if rank == 0 else (sent, 0),
        compute_s=compute_s,
        transfer_s=0.25,
        wait_s=0.5,
    )


def test_totals_and_both_skews():
    window = RankWindow(2)
    assert window.figures().compute_skew is None
    assert window.figures().num_jobs == {"0": 0.0, "1": 0.0}
    for now_s in (10.0, 10.5, 11.0):
        window.add([step(0, jobs=3, sent=10, compute_s=3.0), step(1, jobs=1, sent=30, compute_s=1.0)], now_s)
    found = window.figures()
    assert found.num_jobs == {"0": 9.0, "1": 3.0}
    assert (found.sent_bytes["0"], found.received_bytes["0"]) == (30.0, 90.0)
    assert (found.transfer_s["1"], found.wait_s["1"]) == (0.75, 1.5)
    assert found.compute_skew == pytest.approx(1.5)
    assert found.communication_skew == 1.0, "of two ranks one sends what the other receives"


def test_skew_is_that_of_the_last_minute():
    window = RankWindow(2)
    window.add([step(0, jobs=8, sent=8, compute_s=8.0), step(1)], 0.0)
    assert window.figures().compute_skew == 2.0
    window.add([step(0, jobs=1, compute_s=1.0), step(1, jobs=1, compute_s=1.0)], 100.0)
    found = window.figures()
    assert found.compute_skew == 1.0
    assert found.communication_skew is None, "nothing was sent since"
    assert found.compute_s == {"0": 9.0, "1": 1.0}
