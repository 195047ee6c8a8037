"""What the measuring programs share: the job they are told, the phases they say, calls timed within a budget.

Each is run as `python -m MODULE JOB.json`; it writes what it found to the file that the job names.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Say = Callable[[str], None]
MAX_SAMPLES = 200


def serve(work: Callable[[Mapping[str, Any], Say], Mapping[str, Any]]) -> None:
    """Do the job named on the command line, and write what came of it."""
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(told["result"]).write_text(json.dumps(work(told, _say)), encoding="utf-8")


def timed(call: Callable[[], object], budget_s: float) -> list[float]:
    """Seconds of single calls, as many as the budget allows after one that warms up.

    A call that alone is longer than the budget is not repeated: its one time is all there is.
    """
    first_s = seconds_of(call)
    if first_s >= budget_s:
        return [first_s]
    samples: list[float] = []
    while sum(samples) < budget_s and len(samples) < MAX_SAMPLES:
        samples.append(seconds_of(call))
    return samples


def reading(unit: str, amount: float, samples_s: Sequence[float], **case: object) -> dict[str, Any]:
    """One row of a result: the rate of each sample, and what was measured."""
    return {"case": case, "unit": unit, "values": [amount / seconds for seconds in samples_s]}


def seconds_of(call: Callable[[], object]) -> float:
    """One call, by the wall clock."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _say(phase: str) -> None:
    sys.stdout.write(phase + "\n")
    sys.stdout.flush()
