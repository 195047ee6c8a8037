"""What the experts of a rank have done since its start: jobs, and time beside computing. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True, eq=False)
class Meter:
    """One per rank; its numbers only grow. A job is a choice that the rank's experts computed."""

    num_jobs: int = 0
    transfer_s: float = 0.0  # packing, handing over and unpacking messages
    counters: list[Callable[[], int]] = field(default_factory=list)  # of jobs that others count

    def jobs(self) -> int:
        """All jobs so far."""
        return self.num_jobs + sum(counter() for counter in self.counters)
