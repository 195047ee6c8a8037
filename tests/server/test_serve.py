"""`moesaic serve` as a process: what it refuses at once, and the packaged model end to end."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from checkpoints import llama_config, write_checkpoint

COMMAND = [sys.executable, "-m", "moesaic", "serve"]


def refused(*arguments: str) -> str:
    """The one line of a start that must fail at once."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_a_taken_port_is_one_line_before_anything_is_loaded() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        line = refused("demo", "--port", str(port))
    assert line == (
        f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; change --host or --port"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["deepseek-v3"], "is a preset, which has no weights: give a model folder"),
        (["demo", "--kv-bytes", "much"], "'much' is not a size"),
        (["demo", "--numerics", "slow"], "preset 'slow' is unknown; known: fast, portable"),
        (["demo", "--generation-config", "vllm"], "must be auto or none, got 'vllm'"),
        (["demo", "--log-style", "xml"], "--log-style must be text or json, got 'xml'"),
        (["demo", "--api-key", ""], "the API key is empty"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_a_wrong_number_names_the_flag() -> None:
    done = subprocess.run([*COMMAND, "demo", "--threads", "0"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Invalid value for '--threads': 0 is not in the range x>=1" in " ".join(done.stderr.split())


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, llama_config())
    assert "has no tokenizer.json" in refused(str(tmp_path), "--port", "0")


def test_the_packaged_model_is_served_and_stops_cleanly() -> None:
    arguments = ["demo", "--port", "0", "--threads", "1", "--max-num-seqs", "2", "--kv-bytes", "4MiB"]
    child = subprocess.Popen(
        [*COMMAND, *arguments, "--api-key", "k"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        first, _, example = (child.stdout.readline() for _ in range(3))
        match = re.fullmatch(r"serving demo on (http://127\.0\.0\.1:\d+)\n", first)
        assert match, child.communicate()[1]
        assert example.startswith(f"  curl {match[1]}/v1/chat/completions ")
        with openai.OpenAI(base_url=f"{match[1]}/v1", api_key="k", max_retries=0, timeout=120) as client:
            chat = client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "Hello!"}], max_tokens=3, temperature=0
            )
            assert chat.usage is not None
            assert chat.usage.completion_tokens == 3
            again = client.completions.create(model="demo", prompt="Once upon", max_tokens=2, n=2, seed=1)
            assert [choice.index for choice in again.choices] == [0, 1]
        child.send_signal(signal.SIGTERM)
        _, log = child.communicate(timeout=60)
        assert child.returncode == 0
        defaults = "temperature 0.8, top_p 0.95, max_tokens 256 (generation_config.json; not read: do_sample)"
        assert f"sampling defaults: {defaults}" in log
    finally:
        child.kill()
        child.communicate()
