"""What the experts of a rank have done since its start: jobs, and time beside computing. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Totals since the start. A job is a choice that the rank's experts computed."""

    num_jobs: int
    transfer_s: float  # packing, handing over and unpacking messages
    wait_s: float  # for other ranks, where a transport does not count it


@dataclass(kw_only=True, slots=True, eq=False)
class Meter:
    """One per rank; its numbers only grow."""

    num_jobs: int = 0
    transfer_s: float = 0.0
    others: list[Callable[[], Reading]] = field(default_factory=list)  # what is counted elsewhere

    def read(self) -> Reading:
        """All of it so far."""
        others = [other() for other in self.others]
        return Reading(
            num_jobs=self.num_jobs + sum(one.num_jobs for one in others),
            transfer_s=self.transfer_s + sum(one.transfer_s for one in others),
            wait_s=sum(one.wait_s for one in others),
        )
