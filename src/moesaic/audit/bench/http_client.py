"""Send one request to a server over HTTP, and time it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from moesaic.audit.bench.timing import Timing
from moesaic.audit.bench.workload import Item
from moesaic.errors import ConfigError

TIMEOUT_S = 600.0  # guess: no token for so long means that none will come


@dataclass(slots=True)
class HttpLoad:
    """A server that speaks the OpenAI completions API with streaming."""

    http: httpx.AsyncClient
    model: str
    ignore_eos: bool
    temperature: float = 0.0
    top_p: float = 1.0
    has_salts: bool = False  # the server takes `cache_salt`; others may refuse a field they do not know

    async def send(self, item: Item, salt: str) -> Timing:
        """One request from start to end."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(item.prompt) if isinstance(item.prompt, tuple) else item.prompt,
            "max_tokens": item.output_len,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.has_salts:
            body["cache_salt"] = salt
        sent_s = time.perf_counter()
        arrivals: list[float] = []
        usage: dict[str, Any] = {}
        error, is_rejected = None, False
        try:
            async with self.http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode("utf-8", "replace")[:300]
                    error = f"HTTP {response.status_code}: {text}"
                    is_rejected = response.status_code in (429, 503)
                else:
                    async for chunk in _events(response):
                        if "error" in chunk:
                            error = str(chunk["error"])
                        if any(_has_token(choice) for choice in chunk.get("choices", ())):
                            arrivals.append(time.perf_counter())
                        usage = chunk.get("usage") or usage
        except httpx.HTTPError as failure:
            error = f"{type(failure).__name__}: {failure}"
        details = usage.get("prompt_tokens_details") or {}
        return Timing(
            sent_s=sent_s,
            token_s=tuple(arrivals),
            end_s=time.perf_counter(),
            num_prompt=usage.get("prompt_tokens", 0),
            num_output=usage.get("completion_tokens", len(arrivals)),
            num_wanted=item.output_len,
            num_cached=details.get("cached_tokens") or 0,
            is_rejected=is_rejected,
            error=error,
        )


def connect(url: str, api_key: str | None) -> httpx.AsyncClient:
    """A client that keeps as many connections as a benchmark needs."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=httpx.Timeout(TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )


async def first_model(http: httpx.AsyncClient) -> str:
    """The first model that a server lists.

    Raises: ConfigError when nothing answers there.
    """
    try:
        response = await http.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{http.base_url} lists no model at /v1/models ({error}): check --url, or give --model"
        ) from error


async def active(http: httpx.AsyncClient) -> dict[str, Any]:
    """What a moesaic server says of itself; empty for other servers."""
    try:
        response = await http.get("/v1/internal/active")
        value = response.json() if response.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}
    facts = value.get("engine") if isinstance(value, dict) else None
    return facts if isinstance(facts, dict) else {}


def _has_token(choice: dict[str, Any]) -> bool:
    """A token may add no text yet, such as half a character; the last chunk of a choice may carry none."""
    return bool(choice.get("text")) or choice.get("finish_reason") is None


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            text = line.removeprefix("data:").strip()
            if text == "[DONE]":
                return
            yield json.loads(text)
