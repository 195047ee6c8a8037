"""Another expert plan over HTTP: what comes into force, and what is refused and why."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from harness import Server

from moesaic.spec.codec import to_plain
from moesaic.spec.experts import contiguous_plan

PATH = "/v1/internal/placement"
ARRAYS = ("slot_rank", "slot_expert", "slot_slice", "slot_share")


def plan(**changes: Any) -> dict[str, Any]:
    """For the fake engine's two layers of four experts on two ranks; a third copy of expert 3 on rank 0."""
    return {
        "version": 7,
        "slot_rank": [[1, 1, 0, 0, 0]] * 2,
        "slot_expert": [[0, 1, 2, 3, 3]] * 2,
        "slot_slice": [[0] * 5] * 2,
        "slot_share": [[1, 1, 1, 0.5, 0.5]] * 2,
        **changes,
    }


def test_a_plan_comes_into_force_and_is_told(server: Server) -> None:
    before = server.client.get(PATH).json()
    assert before == to_plain(contiguous_plan((4, 4), 2))
    answer = server.post(PATH, plan())
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"version": 1, "num_stages": 1, "moved_bytes": 1000, "seconds": 0.5}
    assert server.client.get(PATH).json() == plan(version=1)
    assert server.post(PATH, server.client.get(PATH).json()).status_code == 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot_rank": [[1, 1, 0, 0, 0]]}, "must have the same number of layers"),
        ({name: [[0]] for name in ARRAYS}, "it has 1 layers"),
        ({"slot_rank": [[2, 1, 0, 0, 0]] * 2}, "it is for 3 ranks, this engine has 2"),
        ({"slot_rank": [[0] * 5] * 2}, "it is for 1 ranks, this engine has 2"),
        ({"slot_expert": [[0, 1, 2, 2, 2]] * 2}, r"layer 0 has no slot for experts \[3\]"),
        ({"slot_expert": [[0, 1, 2, 3, 4]] * 2}, r"layer 0 names experts \[4\]"),
        (
            {"slot_slice": [[0, 0, 0, 0, 1]] * 2},
            "layer 0 has 5 slots, and 4 experts in 2 slices need 8 or more",
        ),
        (
            to_plain(contiguous_plan((4, 4), 2, 2)),
            "it has experts in 2 slices, and in memory are whole experts: balance for such",
        ),
        ({"slot_share": [[0, 1, 1, 1, 1]] * 2}, r"no slot of experts \[0\] of sparse layer 0 has a share"),
        ({"slot_share": [[1, 1, 1, 1, -1]] * 2}, r"slot_share\[0\]\[4\]"),
        ({"version": 2**31}, "version"),
        ({"version": "x"}, "version"),
        ({"slot_ranks": [[0]]}, "unknown field slot_ranks; did you mean slot_rank"),
    ],
)
def test_plans_that_do_not_fit_are_refused(server: Server, changes: dict[str, Any], message: str) -> None:
    answer = server.post(PATH, plan(**changes))
    assert answer.status_code == 400, answer.text
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(answer.json()["error"]["message"])
    assert server.client.get(PATH).json()["version"] == 0


def test_a_plan_without_room_is_refused_with_the_arithmetic(server: Server) -> None:
    server.engine.rebalance._available_bytes = lambda: 9000
    answer = server.post(PATH, plan())
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "capacity"
    # A layer of four experts is there twice, and four of them travel as sent, on the way, received: 16 kB.
    assert "needs 16.0 kB more at its fullest moment" in answer.json()["error"]["message"]
    assert "and 9.00 kB are available" in answer.json()["error"]["message"]


def test_one_plan_at_a_time(server: Server) -> None:
    server.engine.gate.clear()
    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.append(server.post(PATH, plan())))
    thread.start()
    end_s = time.monotonic() + 10
    while not server.engine.rebalance.is_swapping and time.monotonic() < end_s:
        time.sleep(0.01)
    second = server.post(PATH, plan())
    server.engine.gate.set()
    thread.join(10)
    assert (second.status_code, second.json()["error"]["code"]) == (409, "swap_running")
    assert "1 stages of another plan are left to do" in second.json()["error"]["message"]
    assert first[0].status_code == 200
