from __future__ import annotations

import pytest
from hash_model import HashModel, make_request, make_scheduler, tokens_group

from moesaic.errors import Overloaded
from moesaic.sched.admission import MAX_RETRY_S, MIN_RETRY_S, AdmissionPolicy


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    policy = AdmissionPolicy(max_waiting=3)
    policy.check(num_waiting=2, steps_to_finish=None, step_s=None)
    with pytest.raises(Overloaded, match=r"3 requests are waiting.*again in 5 s") as error:
        policy.check(num_waiting=3, steps_to_finish=50, step_s=0.1)
    assert error.value.retry_after_s == pytest.approx(5.0)
    assert error.value.is_retriable


@pytest.mark.parametrize(
    ("steps", "step_s", "expected"),
    [(None, 0.1, MIN_RETRY_S), (10, None, MIN_RETRY_S), (1, 0.01, MIN_RETRY_S), (10**6, 1.0, MAX_RETRY_S)],
)
def test_the_estimate_is_bounded(steps: int | None, step_s: float | None, expected: float) -> None:
    assert AdmissionPolicy(max_waiting=1).retry_after_s(steps, step_s) == expected


def test_the_scheduler_estimates_from_its_own_steps() -> None:
    scheduler = make_scheduler([tokens_group()], [64], max_num_seqs=1, max_waiting=1)
    model = HashModel([tokens_group()], 4)
    scheduler.add(make_request("first", [1, 2], max_tokens=21, ignore_eos=True), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.commit(model.run(plan), 0.5)  # one token of 21, half a second a step
    scheduler.add(make_request("second", [1, 2]), 1.0)
    with pytest.raises(Overloaded) as error:
        scheduler.add(make_request("third", [1, 2]), 1.0)
    assert error.value.retry_after_s == pytest.approx(10.0)
    scheduler.cancel("second")
    scheduler.add(make_request("third", [1, 2]), 1.0)
