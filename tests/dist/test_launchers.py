"""The same rank started by torchrun, by hand, over a link between two hosts and by Ray.

It gives the tokens of one process and leaves no process behind, whoever is killed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from moesaic.engine.llm import LLM
from moesaic.sched.request import SamplingParams

pytestmark = pytest.mark.long

MARK = "TEST_RUN_ID"
PROMPT = "Once upon a time"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
OPTIONS: dict[str, Any] = {"num_threads": 2, "max_model_len": 256, "kv_bytes": 8_000_000}
FLAGS = ("--threads", "2", "--max-model-len", "256", "--kv-bytes", "8MB")
TIMEOUT_S = 120.0

SCRIPT = f"""
import json, sys
from moesaic.engine.llm import LLM
from moesaic.sched.request import SamplingParams
with LLM("demo", **{OPTIONS!r}, **json.loads(sys.argv[1])) as llm:
    (one,) = llm.generate([{PROMPT!r}], SamplingParams(temperature=0.0, max_tokens=16))
    print(json.dumps(list(one.token_ids)), flush=True)
    sys.stdin.readline()
    try:
        llm.generate([{PROMPT!r}], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    except Exception as error:
        print(error, flush=True)
    sys.stdin.readline()
"""
"""A controller: tokens, then, for every line that it reads, what else there is to say."""


@pytest.fixture(scope="module")
def alone() -> list[int]:
    """What one process says."""
    with LLM("demo", **OPTIONS) as llm:
        return list(llm.generate([PROMPT], GREEDY)[0].token_ids)


class Run:
    """Processes that a test starts, and all that come of them: they carry a mark."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = str(uuid.uuid4())
        self.children: list[subprocess.Popen[str]] = []

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """One more; what it says on standard error goes to a file."""
        with (self.folder / f"{len(self.children)}.err").open("w") as errors:
            child = subprocess.Popen(
                command,
                env=os.environ | {MARK: self.id, "OMP_NUM_THREADS": "1"} | (env or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.children.append(child)
        return child

    def living(self) -> list[int]:
        """Processes with the mark, grandchildren and orphans too."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and self.id.encode() in _environment(folder):
                found.append(int(folder.name))
        return found

    def errors(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.err")))

    def await_end(self, timeout_s: float = 30.0) -> None:
        """Raises: AssertionError when a process lives on."""
        end_s = time.monotonic() + timeout_s
        while left := self.living():
            assert time.monotonic() < end_s, f"{left} live on: {self.errors()}"
            time.sleep(0.1)


def _environment(process: Path) -> bytes:
    try:
        if (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return b""
        return (process / "environ").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    found = Run(tmp_path)
    yield found
    for pid in found.living():
        os.kill(pid, signal.SIGKILL)
    for child in found.children:
        child.wait(10)
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()


def line_of(child: subprocess.Popen[str], run: Run, start: str = "") -> str:
    """The next line that begins so."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(start):
            return line.strip()
    raise AssertionError(f"it ended: {run.errors()}")


def say(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def world(rank: int, num_ranks: int, host: str, port: int) -> dict[str, str]:
    """What whoever starts all ranks has to tell each of them."""
    return {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": host, "MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def test_torchrun_on_two_nodes_serves_the_tokens_of_one_process_and_ends_on_sigterm(
    alone: list[int], run: Run
) -> None:
    """Two calls of torchrun, one process each; the signal comes while a request runs, which is finished."""
    port = str(free_port())
    agents = [
        run.start(
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
            *("--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port),
            *("-m", "moesaic", "serve", "demo", "--port", "0", "--dispatcher", "two_level", *FLAGS),
            env={"PYTHONUNBUFFERED": "1"},
        )
        for node in range(2)
    ]
    url = line_of(agents[0], run, "serving").split()[-1]
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "logprobs": 0}
    active = httpx.get(f"{url}/v1/internal/active", timeout=30).json()["engine"]
    assert (active["layout"]["num_ranks"], active["layout"]["ranks_per_node"]) == (2, 1)
    with LLM("demo", **OPTIONS) as llm:
        assert llm.tokenizer is not None
        expected = llm.tokenizer.decode(alone)
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"] == expected
    with httpx.stream(
        "POST",
        f"{url}/v1/completions",
        json=body | {"max_tokens": 150, "stream": True, "ignore_eos": True},
        timeout=60,
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        for agent in agents:
            agent.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2].replace(" ", "")
    run.await_end()


def test_a_killed_rank_is_named_and_ranks_end_with_a_killed_controller(alone: list[int], run: Run) -> None:
    """Started by hand, as by any launcher that sets torchrun's variables: rank 0's store is the first."""
    port = free_port()
    controller, other = (
        run.start(sys.executable, "-c", SCRIPT, "{}", env=world(rank, 2, "127.0.0.1", port))
        for rank in range(2)
    )
    assert json.loads(line_of(controller, run)) == alone
    other.kill()
    other.wait(10)
    say(controller)
    assert "rank 1 has ended" in line_of(controller, run)
    own = [pid for pid in run.living() if pid != controller.pid]
    controller.kill()
    run.await_end()
    assert len(own) <= 1  # rank 0, if it had not left yet


def test_ranks_in_two_network_namespaces_give_the_tokens_of_one_process(alone: list[int], run: Run) -> None:
    options = json.dumps({"dispatcher": "exchange"})  # they share a kernel, and so its memory
    with two_namespaces() as (names, host):
        controller, _ = (
            run.start(
                *("ip", "netns", "exec", name, sys.executable, "-c", SCRIPT, options),
                env=world(rank, 2, host, 29500),
            )
            for rank, name in enumerate(names)
        )
        assert json.loads(line_of(controller, run)) == alone
        controller.kill()
        run.await_end()


@contextmanager
def two_namespaces() -> Iterator[tuple[tuple[str, str], str]]:
    """((names), address in the first): hosts that share one link and nothing else of a network."""
    names = tuple(f"moesaic-{os.getpid()}-{i}" for i in range(2))
    links = tuple(f"mo{os.getpid() % 10**6}{i}" for i in range(2))
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for i, (name, link) in enumerate(zip(names, links, strict=True)):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"10.231.7.{i + 1}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield (names[0], names[1]), "10.231.7.1"
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)


def ip(*arguments: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    try:
        subprocess.run(("ip", *arguments), check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("network namespaces need the program ip (package iproute2)")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"ip {' '.join(arguments)} is refused here: {error.stderr.strip()}")


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'moesaic[ray]'")
def test_ray_starts_ranks_on_two_nodes_and_none_outlives_the_controller(alone: list[int], run: Run) -> None:
    with ray_cluster(run) as address:
        options = {"launcher": "ray", "num_ranks": 2}
        env = {"RAY_ADDRESS": address}
        first = run.start(sys.executable, "-c", SCRIPT, json.dumps(options), env=env)
        assert json.loads(line_of(first, run)) == alone
        ranks = ranks_of_ray()
        assert sorted(ranks) == ["ray::moesaic rank 0", "ray::moesaic rank 1"]
        os.kill(ranks["ray::moesaic rank 1"], signal.SIGKILL)
        say(first)
        assert "rank 1 has ended" in line_of(first, run, "the engine")
        first.kill()
        end_s = time.monotonic() + 30
        while ranks_of_ray():
            assert time.monotonic() < end_s, "a rank lives on"
            time.sleep(0.2)


@contextmanager
def ray_cluster(run: Run) -> Iterator[str]:
    """Two nodes of real processes on this machine."""
    port = free_port()
    common = ("--num-cpus", "2", "--disable-usage-stats", "--block")
    where = ("--include-dashboard", "false", "--temp-dir", f"/tmp/ray-{os.getpid()}")
    ray = (sys.executable, "-m", "ray.scripts.scripts", "start")
    run.start(*ray, "--head", "--port", str(port), *where, *common)
    address = f"127.0.0.1:{port}"
    await_port(port)
    run.start(*ray, "--address", address, *common)
    yield address


def await_port(port: int) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < end_s, "no Ray"
            time.sleep(0.2)
        else:
            return


def ranks_of_ray() -> dict[str, int]:
    """Process ids by what Ray calls the processes of our tasks."""
    found: dict[str, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words: Sequence[bytes] = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].startswith(b"ray::moesaic rank"):
            found[words[0].decode().strip()] = int(folder.name)
    return found
