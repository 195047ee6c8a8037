"""An application, its fake engine, and a client inside the process."""

from __future__ import annotations

import json
from typing import Any

from fakes import FakeEngine
from fastapi import FastAPI
from starlette.testclient import TestClient

from moesaic.text.tokenizer import Tokenizer


class Server:
    """One application, its engine, and a client inside the process."""

    def __init__(self, app: FastAPI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
        self.app, self.engine, self.tokenizer = app, engine, tokenizer
        self.client = TestClient(app)
        self.client.__enter__()  # one event loop for all requests

    def close(self) -> None:
        self.client.__exit__(None, None, None)
        self.engine.close()

    def post(self, path: str, body: Any, **headers: str) -> Any:
        return self.client.post(path, json=body, headers=headers)

    def complete(self, **body: Any) -> Any:
        """The body of a completion that must succeed."""
        answer = self.post("/v1/completions", {"prompt": "the cat", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, content: Any = "hi", **body: Any) -> Any:
        answer = self.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **body}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream; `[DONE]` stays a text."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = answer.text.split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]

    def saying(self, *texts: str, ends: bool = True) -> None:
        """Make the engine answer with these texts, in the order of its requests, and the end token."""
        replies = [self.tokenizer.encode(text, add_special_tokens=False) + [1] * ends for text in texts]
        count = iter(range(10**6))
        self.engine._answer = lambda request: replies[next(count) % len(replies)]
