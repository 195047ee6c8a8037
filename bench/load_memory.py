"""Peak of anonymous memory while a checkpoint is loaded, above the process before, and what it ought to be.

Allowed are the weights as they are kept, the largest tensor while it is read, and 10 percent. Linux only: the
figure is RssAnon of /proc/self/status, sampled by a thread, so the page cache of the files does not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path

from moesaic.audit.bench.report import describe_machine, describe_versions
from moesaic.models.build import load
from moesaic.models.checkpoint import Checkpoint
from moesaic.units import format_bytes

ALLOWANCE = 0.10
SAMPLE_S = 0.002


def anonymous_bytes() -> int:
    """Anonymous memory of this process now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("/proc/self/status has no RssAnon: this script needs Linux")


class Peak:
    """The greatest value seen while the `with` block ran."""

    def __enter__(self) -> Peak:
        self.before = self.most = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.most = max(self.most, anonymous_bytes())


def main() -> None:
    """Load, compare, and exit 3 when the peak is above what is allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with Peak() as peak:
        model = load(arguments.model, num_threads=arguments.threads, dtype=arguments.dtype)
    largest = max(tensor.num_bytes for tensor in Checkpoint.open(arguments.model).tensors.values())
    allowed = (1 + ALLOWANCE) * (model.weight_bytes + largest)
    result = {
        "peak_bytes": peak.most - peak.before,
        "weight_bytes": model.weight_bytes,
        "largest_tensor_bytes": largest,
        "allowed_bytes": allowed,
        "before_bytes": peak.before,
        "after_bytes": anonymous_bytes() - peak.before,
        "machine": describe_machine(),
        "versions": describe_versions(),
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"peak {format_bytes(result['peak_bytes'])} above {format_bytes(peak.before)}; allowed "
            f"{format_bytes(allowed)} = weights {format_bytes(model.weight_bytes)} + largest tensor "
            f"{format_bytes(largest)}, and {ALLOWANCE:.0%}"
        )
    sys.exit(3 if result["peak_bytes"] > allowed else 0)


if __name__ == "__main__":
    main()
