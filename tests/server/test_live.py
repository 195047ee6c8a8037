"""Over a real socket: the official client, a client that leaves, signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fakes import FakeEngine

from moesaic.errors import ConfigError
from moesaic.server.app import create_app
from moesaic.server.run import bind, listen, url_of
from moesaic.server.settings import ServerSettings
from moesaic.text.template import ChatTemplate
from moesaic.text.tokenizer import Tokenizer

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


class Live:
    """A listening server on a thread of this process."""

    def __init__(self, url: str, engine: FakeEngine, tokenizer: Tokenizer) -> None:
        self.url, self.engine, self.tokenizer = url, engine, tokenizer
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="right", max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[Live]:
    engine = FakeEngine(vocab=tokenizer.vocab_size, max_model_len=5000, step_s=0.0005)
    app = create_app(engine, tokenizer, ServerSettings(model_name="tiny", api_key="right"), template=template)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    with bind("127.0.0.1", 0) as sock:
        url = url_of(sock)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        found = Live(url, engine, tokenizer)
        yield found
        found.client.close()
        server.should_exit = True
        thread.join(20)
    engine.close()


def test_the_client_completes_and_chats(live: Live) -> None:
    answer = live.client.completions.create(model="tiny", prompt="the cat", max_tokens=5, seed=1, logprobs=2)
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    chat = live.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=4, logprobs=True, top_logprobs=2, n=2
    )
    assert [c.index for c in chat.choices] == [0, 1]
    assert chat.choices[0].message.role == "assistant"
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == chat.choices[0].message.content
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 0
    assert [model.id for model in live.client.models.list()] == ["tiny"]
    assert live.client.models.retrieve("tiny").id == "tiny"


def test_the_client_streams(live: Live) -> None:
    whole = live.client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=9, seed=2)
    stream = live.client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=9,
        seed=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "length"
    ]
    pieces = live.client.completions.create(model="tiny", prompt="a", max_tokens=9, stream=True)
    assert len("".join(piece.choices[0].text for piece in pieces)) == 9


def test_errors_become_the_clients_exceptions(live: Live) -> None:
    create = live.client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
        create(model="tiny", messages=MESSAGES, max_tokens=-1)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError, match="not served here") as missing:
        create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        create(model="tiny", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.AuthenticationError, match="API key"):
        live.client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="context") as long:
        create(model="tiny", messages=[{"role": "user", "content": "a " * 6000}])
    assert long.value.code == "context_length_exceeded"
    live.engine.is_draining = True
    with pytest.raises(openai.RateLimitError):
        create(model="tiny", messages=MESSAGES)
    live.engine.is_draining = False


def test_an_error_in_a_stream_reaches_the_client(live: Live) -> None:
    live.engine._fail_after = 2
    try:
        with pytest.raises(openai.APIError, match="generation failed"):
            list(live.client.completions.create(model="tiny", prompt="a", stream=True))
    finally:
        live.engine._fail_after = None


def test_leaving_a_stream_ends_the_request(live: Live) -> None:
    live.engine.cancelled.clear()
    stream = live.client.completions.create(model="tiny", prompt="a", max_tokens=4000, stream=True)
    next(iter(stream))
    stream.close()
    assert live.engine.wait_idle(10)
    assert len(live.engine.cancelled) == 1


def test_leaving_while_waiting_ends_the_request(live: Live) -> None:
    live.engine.cancelled.clear()
    live.engine.gate.clear()
    with pytest.raises(openai.APITimeoutError):
        live.client.with_options(timeout=0.3).completions.create(model="tiny", prompt="a")
    until(lambda: bool(live.engine.cancelled))
    live.engine.gate.set()
    assert len(live.engine.cancelled) == 1


def test_half_a_request_does_no_harm(live: Live) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    for data in (b"POST /v1/completions HTTP/1.1\r\n", b"GARBAGE\r\n\r\n", b"\x16\x03\x01\x00"):
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall(data)
    assert live.client.models.list().data[0].id == "tiny"


def test_two_servers_that_start_at_once_cannot_share_a_port() -> None:
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        listen(first)
        with pytest.raises(ConfigError, match="Address already in use"):
            listen(second)


def test_addresses_as_a_client_writes_them() -> None:
    for host, start in (("0.0.0.0", "http://127.0.0.1:"), ("::1", "http://[::1]:"), ("localhost", "http://")):
        with bind(host, 0) as sock:
            assert url_of(sock).startswith(start)


def test_a_taken_port_is_one_clear_error() -> None:
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"cannot listen on 127\.0\.0\.1 port {port}: Address already in use"
        ):
            bind("127.0.0.1", port)
    for host, wrong in (("127.0.0.1", 70000), ("host.invalid.", 8000)):
        with pytest.raises(ConfigError):
            bind(host, wrong)


# -- a process of its own, which gets signals -----------------------------------------------------------


class Child:
    """A server process that answers two tokens of a request and then waits for SIGUSR1."""

    def __init__(self, folder: Path, drain_timeout_s: float) -> None:
        script = Path(__file__).with_name("serve_fake.py")
        command = [sys.executable, str(script), str(folder), str(drain_timeout_s)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        url = self.process.stdout.readline().strip()
        assert url, self.process.communicate()[1]
        self.client = httpx.Client(base_url=url, timeout=30)
        until(self.is_listening)

    def is_listening(self) -> bool:
        try:
            return self.client.get("/health").status_code == 200
        except httpx.ConnectError:
            return False

    def is_unready(self) -> bool:
        return self.client.get("/ready").status_code == 503

    @contextmanager
    def stream(self) -> Iterator[Iterator[str]]:
        """The lines of an answer that has begun."""
        body = {"prompt": "a", "max_tokens": 20, "stream": True}
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            yield lines

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def child(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Child]:
    found = Child(model_folder, request.param)
    yield found
    found.close()


@pytest.mark.parametrize("child", [60.0], indirect=True)
def test_a_server_whose_engine_has_ended_ends_with_an_error(child: Child) -> None:
    child.process.send_signal(signal.SIGUSR2)
    assert child.process.wait(30) == 1
    assert child.process.stderr is not None
    assert "EngineLost: the engine has ended" in child.process.stderr.read()


@pytest.mark.parametrize("child", [60.0], indirect=True)
def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(child: Child) -> None:
    with child.stream() as lines:
        child.process.send_signal(signal.SIGTERM)
        until(child.is_unready)
        refused = child.client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert child.client.get("/health").status_code == 200
        child.process.send_signal(signal.SIGUSR1)
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in events[-2]
    assert child.process.wait(30) == 0
    assert child.process.stderr is not None
    logged = [json.loads(line)["event"] for line in child.process.stderr]
    drained = ["SIGTERM: draining, 1 request runs", "drained"]
    assert [event for event in logged if "drain" in event] == drained


@pytest.mark.parametrize("child", [0.2], indirect=True)
def test_what_does_not_finish_in_time_ends_with_an_error(child: Child) -> None:
    with child.stream() as lines:
        child.process.send_signal(signal.SIGTERM)
        events = [line for line in lines if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "generation_failed"
    assert child.process.wait(30) == 0


@pytest.mark.parametrize("child", [60.0], indirect=True)
def test_a_second_signal_does_not_wait(child: Child) -> None:
    with child.stream():
        child.process.send_signal(signal.SIGINT)
        until(child.is_unready)
        child.process.send_signal(signal.SIGINT)
        assert child.process.wait(30) == 0
