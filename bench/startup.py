"""Seconds until a command answers: `moesaic --help`, `inspect deepseek-v3`, and a server that is ready."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from statistics import median

from moesaic.audit.bench.report import describe_machine, describe_versions, load_average

READY_TIMEOUT_S = 600.0


def time_command(arguments: list[str]) -> float:
    """Seconds of one run that must succeed."""
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", "moesaic", *arguments], check=True, capture_output=True)
    return time.perf_counter() - began_s


def time_server(model: str, threads: int | None) -> float:
    """Seconds from the start of the process until /ready says 200."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moesaic", "serve", model, "--port", str(port)]
    command += [] if threads is None else ["--threads", str(threads)]
    began_s = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while time.perf_counter() - began_s < READY_TIMEOUT_S:
            if server.poll() is not None:
                raise SystemExit(f"the server ended: {server.communicate()[1].decode()[-500:]}")
            if is_ready(f"http://127.0.0.1:{port}/ready"):
                return time.perf_counter() - began_s
            time.sleep(0.02)
        raise SystemExit(f"the server was not ready after {READY_TIMEOUT_S:.0f} s")
    finally:
        server.terminate()
        server.wait(30)


def is_ready(url: str) -> bool:
    """Whether the server takes requests."""
    try:
        with urllib.request.urlopen(url, timeout=1) as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def main() -> None:
    """Time each, `--runs` times; the first run of each is not counted (it fills the file cache)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a model folder to serve, or demo; left out: no server is started")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    before = load_average()
    tasks = {
        "help_s": lambda: time_command(["--help"]),
        "inspect_deepseek_v3_s": lambda: time_command(["inspect", "deepseek-v3"]),
    }
    if arguments.model:
        tasks["serve_ready_s"] = lambda: time_server(arguments.model, arguments.threads)
    figures = {}
    for name, task in tasks.items():
        times = [task() for _ in range(1 + arguments.runs)][1:]
        figures[name] = {"median": median(times), "min": min(times), "max": max(times)}
        if not arguments.json:
            figure = figures[name]
            print(f"{name:24s} {figure['median']:6.2f} s [{figure['min']:.2f} .. {figure['max']:.2f}]")
    result = {
        "figures": figures,
        "load_before": before,
        "machine": describe_machine(),
        "versions": describe_versions(),
    }
    print(json.dumps(result, indent=2) if arguments.json else f"{result['machine']} load {before:.1f}")


if __name__ == "__main__":
    main()
