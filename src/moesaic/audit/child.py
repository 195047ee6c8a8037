"""A job in a process of its own: its memory goes back to the system when it ends. No torch here.

The job is a JSON file; the child writes arrays and `NAME.json` beside it, and on stdout one line per phase,
which the parent shows when a phase takes long.
"""

from __future__ import annotations

import json
import queue
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from moesaic.errors import MoesaicError, UnsupportedModelError

QUIET_S = 2.0
"""A phase that takes longer is shown."""
SAMPLE_S = 0.05  # guess: between two looks at a child's own memory; no layer is widened and gone sooner

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What both sides of a comparison are told."""

    model: str  # folder of the checkpoint
    dtype: str | None  # None: the checkpoint's own
    num_threads: int
    prompts: tuple[tuple[int, ...], ...]
    num_tokens: int  # greedy tokens after each prompt
    folder: str  # where arrays and results go
    backend: str | None = None  # of our side's kernels; None: the fastest here
    format: str | None = None  # that our side rounds weights to; None: the dtype
    kv_format: str | None = None  # the same of keys and values
    wire_format: str | None = None  # and of rows on their way to experts
    matmul_shards: int | None = None  # leaves of our row-parallel matmuls; None: the preset's
    is_long: bool = False  # longrope: transformers is told to take the long factors at every length
    family: str = ""  # the model_type whose class transformers uses where it does not know the folder's own

    def path(self, name: str) -> Path:
        """A file of the job's folder."""
        return Path(self.folder) / name


class ChildFailed(MoesaicError):
    """A child ended without a result; the message holds the end of what it said."""


class ChildKilled(ChildFailed):
    """A child was ended by a signal: the machine, not the model, is what failed."""


def run_child(module: str, name: str, job: Job, show: Say) -> dict[str, Any]:
    """Run `python -m MODULE` on a job and return its `NAME.json`.

    Raises: ChildFailed when the process ended without one; ChildKilled when a signal ended it.
    """
    try:
        return run_program(module, name, Path(job.folder), asdict(job), show)
    except ChildKilled as killed:
        raise ChildKilled(f"{killed}; where memory ran out, --dtype bfloat16 needs less") from killed


def run_program(
    module: str, name: str, folder: Path, told: Mapping[str, Any], show: Say, *,
    timeout_s: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run `python -m MODULE folder/NAME.job.json` and return the `folder/NAME.json` that it writes.

    What it said on stderr is left in `folder/NAME.log`.

    Raises: ChildFailed when the process ended without a result or took longer than `timeout_s`; ChildKilled
            when a signal ended it.
    """
    job_path, result_path, log_path = (folder / f"{name}.{end}" for end in ("job.json", "json", "log"))
    job_path.write_text(json.dumps(told))
    with open(log_path, "w") as log:
        process = subprocess.Popen(
            # -P: a module that lies in the current folder must not stand in for one of a library
            [sys.executable, "-P", "-m", module, str(job_path)],
            stdin=subprocess.DEVNULL,  # no library asks a question that nobody sees
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            _follow(process, name, show, timeout_s)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    if not result_path.exists():
        said = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
        why = said[-1] if said else "it said nothing"
        if process.returncode < 0:
            raise ChildKilled(
                f"the {name} process was ended by signal {-process.returncode}, so nothing was decided; 9: "
                f"memory ran out, free some. It last said: {why}"
            )
        raise ChildFailed(f"the {name} process ended with status {process.returncode}: {why}")
    result: dict[str, Any] = json.loads(result_path.read_text())
    return result


def serve_job(name: str, work: Callable[[Job, Say], Mapping[str, Any]]) -> None:
    """The child's side: do the job named on the command line, and write what came of it.

    An expected error becomes the result's `error`, for the parent to tell; `is_unsupported` says whether the
    model is one that this side does not know.
    """
    told = json.loads(Path(sys.argv[1]).read_text())
    told["prompts"] = tuple(tuple(prompt) for prompt in told["prompts"])
    job = Job(**told)
    own = OwnMemory()
    try:
        result = dict(work(job, _say))
    except MoesaicError as error:
        result = {"error": str(error), "is_unsupported": isinstance(error, UnsupportedModelError)}
    result["peak_rss_bytes"] = peak_rss_bytes()
    result["peak_own_bytes"] = own.peak_bytes()
    job.path(f"{name}.json").write_text(json.dumps(result))


def peak_rss_bytes() -> int:
    """The most memory that this process had resident, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class OwnMemory:
    """The most memory of this process that no file backs, by looking every `SAMPLE_S` from now on.

    It is what a machine has to have: pages of a mapped checkpoint can be dropped and read again.
    """

    def __init__(self) -> None:
        self._peak_bytes = own_bytes() or 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def peak_bytes(self) -> int | None:
        """The most so far; ends the looking. None where the system does not say."""
        self._has_ended.set()
        self._thread.join()
        return self._peak_bytes or None

    def _look(self) -> None:
        while not self._has_ended.wait(SAMPLE_S) and (now := own_bytes()) is not None:
            self._peak_bytes = max(self._peak_bytes, now)


def own_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Resident memory that no file backs; None where the system does not say."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), None)


def _say(phase: str) -> None:
    sys.stdout.write(phase + "\n")
    sys.stdout.flush()


def _follow(process: subprocess.Popen[str], name: str, show: Say, timeout_s: float | None) -> None:
    """Read phases until the child closes its stdout; show each one that lasts longer than QUIET_S."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    stream: IO[str] = process.stdout  # type: ignore[assignment]  # a pipe was asked for

    def read() -> None:
        for line in stream:
            lines.put(line.strip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    start_s = time.monotonic()
    phase, began_s, is_shown = "starting", start_s, False
    while True:
        try:
            line = lines.get(timeout=QUIET_S)
        except queue.Empty:
            now_s = time.monotonic()
            if timeout_s is not None and now_s - start_s > timeout_s:
                raise ChildFailed(
                    f"the {name} process was ended after {now_s - start_s:.0f} s, while: {phase}"
                ) from None
            if not is_shown and now_s - began_s >= QUIET_S:
                show(f"{name}: {phase}")
                is_shown = True
            continue
        if line is None:
            return
        phase, began_s, is_shown = line, time.monotonic(), False
