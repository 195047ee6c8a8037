"""Send one request to an engine in this process, and time it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from moesaic.audit.bench.timing import Timing
from moesaic.audit.bench.workload import Item
from moesaic.engine.client import EngineClient
from moesaic.errors import ConfigError, Overloaded, RequestError
from moesaic.sched.request import Request, RequestEvent, SamplingParams
from moesaic.text.tokenizer import Tokenizer


class Client(Protocol):
    """Whatever answers requests."""

    async def send(self, item: Item, salt: str) -> Timing:
        """One request from start to end. `salt` keeps its cached prefixes apart from those of other runs.

        Raises: ConfigError when this workload can never run there.
        """
        ...


@dataclass(slots=True)
class EngineLoad:
    """An engine in this process; times are taken on its own thread."""

    engine: EngineClient
    tokenizer: Tokenizer | None
    ignore_eos: bool
    temperature: float = 0.0
    top_p: float = 1.0
    _ids: count[int] = field(default_factory=count)

    async def send(self, item: Item, salt: str) -> Timing:
        """One request from start to end."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[RequestEvent] = loop.create_future()
        arrivals: list[float] = []
        num_cached = num_output = 0

        def on_event(event: RequestEvent) -> None:
            nonlocal num_cached, num_output
            if event.token_ids:
                arrivals.append(time.perf_counter())
                num_output += len(event.token_ids)
            num_cached = max(num_cached, event.num_cached_tokens)
            if event.finish_reason is not None:
                loop.call_soon_threadsafe(done.set_result, event)

        request = self._request(item, salt)
        sent_s = time.perf_counter()
        error, is_rejected = None, False
        try:
            self.engine.submit(request, on_event)
            event = await done
            error = event.error if event.finish_reason == "error" else None
        except Overloaded as refusal:
            error, is_rejected = str(refusal), True
        except RequestError as refusal:
            raise ConfigError(f"the engine refuses this workload: {refusal}") from refusal
        return Timing(
            sent_s=sent_s,
            token_s=tuple(arrivals),
            end_s=arrivals[-1] if arrivals else time.perf_counter(),
            num_prompt=len(request.prompt_ids),
            num_output=num_output,
            num_wanted=item.output_len,
            num_cached=num_cached,
            is_rejected=is_rejected,
            error=error,
        )

    def _request(self, item: Item, salt: str) -> Request:
        prompt = item.prompt
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("text prompts need a tokenizer.json in the model folder")
            prompt = tuple(self.tokenizer.encode(prompt))
        number = next(self._ids)
        return Request(
            request_id=f"bench-{number}",
            prompt_ids=prompt,
            sampling=SamplingParams(
                temperature=self.temperature,
                top_p=self.top_p,
                max_tokens=item.output_len,
                ignore_eos=self.ignore_eos,
            ),
            seed=number,
            eos_token_ids=self.tokenizer.eos_token_ids if self.tokenizer else self.engine.spec.eos_token_ids,
            salt=salt,
        )
