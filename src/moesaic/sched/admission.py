"""Who may wait: a bounded queue, and an honest estimate of when to come back. Numbers in, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.errors import Overloaded

MIN_RETRY_S = 1.0  # guess: the Retry-After header counts whole seconds
MAX_RETRY_S = 60.0  # guess: a client that waits longer has given up


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionPolicy:
    """Bounds the queue at `max_waiting` requests."""

    max_waiting: int

    def check(self, *, num_waiting: int, steps_to_finish: int | None, step_s: float | None) -> None:
        """Let one more request wait, or refuse it.

        `steps_to_finish` is how many steps the next running request to finish still needs at most, `step_s`
        what a step took recently; None: not known yet.

        Raises:  Overloaded with the seconds after which a place is likely to be free.
        """
        if num_waiting < self.max_waiting:
            return
        retry_after_s = self.retry_after_s(steps_to_finish, step_s)
        raise Overloaded(
            f"{num_waiting} requests are waiting and max_waiting is {self.max_waiting}; "
            f"try again in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
        )

    def retry_after_s(self, steps_to_finish: int | None, step_s: float | None) -> float:
        """Seconds until the next running request ends, between MIN_RETRY_S and MAX_RETRY_S."""
        if steps_to_finish is None or step_s is None:
            return MIN_RETRY_S
        return min(max(steps_to_finish * step_s, MIN_RETRY_S), MAX_RETRY_S)
