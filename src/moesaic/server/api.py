"""The functions behind the routes: the OpenAI API over one engine, and what operators look at."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Annotated, Any, TypeVar

from fastapi import Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from moesaic import __version__
from moesaic.engine.client import EngineClient
from moesaic.errors import HostMemoryShort, Overloaded, SwapRunning
from moesaic.log import get_logger
from moesaic.obs.metrics import CONTENT_TYPE, Metrics
from moesaic.server.body import parse_body, query_error, read_body
from moesaic.server.choice import Delta
from moesaic.server.expert_report import expert_report
from moesaic.server.generation import Runner, until_gone
from moesaic.server.job import Arrival, Job, JobMaker
from moesaic.server.openapi import MAX_TOKENS_HEADER
from moesaic.server.problem import HttpError, Problem, problem_of, unavailable
from moesaic.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    PlacementBody,
    TokenizeBody,
    TokenizeChatBody,
)
from moesaic.server.reply import ReplyMaker
from moesaic.server.settings import ServerSettings
from moesaic.server.stream import EventStream
from moesaic.spec.codec import to_plain
from moesaic.text.defaults import SamplingDefaults
from moesaic.text.template import ChatTemplate
from moesaic.text.tokenizer import Tokenizer

_log = get_logger("server")
_M = TypeVar("_M", bound=BaseModel)
_LARGE_BODY = 1 << 16  # bytes; larger ones are parsed off the event loop
_ENGINE_FIGURES = (
    "is_ready", "is_draining", "num_running", "num_waiting", "kv_blocks_total", "kv_blocks_used",
    "kv_block_tokens", "kv_bytes", "weight_bytes", "max_num_seqs", "max_model_len",
)  # fmt: skip


class Api:
    """The functions behind the routes, and the state of one application."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        *,
        template: ChatTemplate | None,
        defaults: SamplingDefaults,
        created_s: int,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.is_draining = False  # set once, by whoever shuts the server down
        active = engine.snapshot().active
        digest = str(active.get("numerics_digest", ""))
        self._fingerprint = f"fp_{digest[:12]}"
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._created_s = created_s
        self._moe_layers = tuple(layer_idx for layer_idx, _ in engine.spec.moe_layers)
        self.metrics = Metrics(
            snapshot=engine.snapshot,
            expert_load=engine.expert_load,
            moe_layers=self._moe_layers,
            info={
                "version": __version__,
                "model": settings.model_name,
                "backend": str(active.get("backend", "")),
                "numerics_digest": digest,
            },
        )
        self._runner = Runner(engine, tokenizer, self.metrics)
        self._jobs = JobMaker(
            tokenizer=tokenizer,
            template=template,
            defaults=defaults,
            model_name=settings.model_name,
            max_model_len=engine.max_model_len,
            vocab=engine.spec.vocab,
            max_sequences=settings.max_sequences,
        )

    # -- the OpenAI API --------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """Continue one or more prompts."""
        body = await self._body(request, {"prompt": CompletionBody})
        return await self._answer(request, lambda arrival: self._jobs.completion(body, arrival))

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await self._body(request, {"messages": ChatBody})
        return await self._answer(request, lambda arrival: self._jobs.chat(body, arrival))

    async def models(self) -> dict[str, Any]:
        """The one model served."""
        return {"object": "list", "data": [self._model_card()]}

    async def model(self, model_id: str) -> dict[str, Any]:
        """The model of that name."""
        self._jobs.check_model(model_id)
        return self._model_card()

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Token ids of a text, or of messages through the chat template."""
        models: dict[str, type[TokenizeBody | TokenizeChatBody]] = {
            "messages": TokenizeChatBody,
            "prompt": TokenizeBody,
        }
        body = await self._body(request, models)
        self._jobs.check_model(body.model)
        if isinstance(body, TokenizeBody):
            encoded = await asyncio.to_thread(
                self._jobs.encode, body.prompt, add_special_tokens=body.add_special_tokens
            )
        else:
            encoded = await asyncio.to_thread(self._jobs.encode_chat, body)
        return {
            "tokens": list(encoded.ids),
            "count": len(encoded.ids),
            "max_model_len": self.engine.max_model_len,
        }

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """The text of token ids."""
        body = await self._body(request, {"tokens": DetokenizeBody})
        self._jobs.check_model(body.model)
        self._jobs.check_ids(body.tokens, "tokens")
        skips = bool(body.skip_special_tokens)
        return {
            "prompt": await asyncio.to_thread(self._tokenizer.decode, body.tokens, skip_special_tokens=skips)
        }

    # -- for operators ---------------------------------------------------------------------------------

    async def health(self) -> Response:
        """Whether the engine lives; it does while it drains."""
        snapshot = self.engine.snapshot()
        is_alive = snapshot.is_ready or snapshot.is_draining or self.is_draining
        return JSONResponse({"status": "ok" if is_alive else "stopped"}, status_code=200 if is_alive else 503)

    async def ready(self) -> Response:
        """Whether a new request would be taken."""
        if self.is_draining or not self.engine.snapshot().is_ready:
            problem = unavailable("not ready")
            return JSONResponse({"status": "not ready"}, status_code=503, headers=dict(problem.headers))
        return JSONResponse({"status": "ready"})

    async def show_metrics(
        self, names: Annotated[list[str] | None, Query(alias="name[]")] = None
    ) -> Response:
        """Metrics as Prometheus reads them; `name[]` picks series."""
        return Response(await asyncio.to_thread(self.metrics.render, names or ()), media_type=CONTENT_TYPE)

    async def active(self) -> Response:
        """What runs, with which numerics, limits and effects, and what was refused."""
        snapshot = self.engine.snapshot()
        figures = {name: getattr(snapshot, name) for name in _ENGINE_FIGURES}
        value = {
            "version": __version__,
            "model": self.settings.model_name,
            "system_fingerprint": self._fingerprint,
            "tokenizer_digest": self._tokenizer.digest,
            "sampling_defaults": dict(self._defaults.values),
            "engine": {**figures, **snapshot.active},
        }
        return Response(json.dumps(value, default=str), media_type="application/json")

    async def experts(
        self, window_s: Annotated[float | None, Query(gt=0, allow_inf_nan=False)] = None
    ) -> dict[str, Any]:
        """How often each expert was chosen, since start or over the last `window_s` seconds."""
        return expert_report(self.engine.expert_load(window_s), self._moe_layers, window_s)

    async def placement(self) -> dict[str, Any]:
        """Which rank holds which experts, as the body of a POST here and as a file for --placement."""
        plain: dict[str, Any] = to_plain(self.engine.placement())
        return plain

    async def place(self, request: Request) -> dict[str, Any]:
        """Go over to another expert plan while requests run; answered when it is in force."""
        body = await self._body(request, {"slot_rank": PlacementBody})
        try:
            swapped = await asyncio.to_thread(lambda: self.engine.adopt(body.plan()))
        except SwapRunning as error:
            raise HttpError(Problem(status=409, message=str(error), code="swap_running")) from error
        except HostMemoryShort as error:
            raise HttpError(Problem(status=409, message=str(error), code="capacity")) from error
        return dataclasses.asdict(swapped)

    async def on_error(self, request: Request, error: Exception) -> Response:
        """Any expected error as its body."""
        match error:
            case HTTPException():
                problem = Problem(
                    status=error.status_code,
                    message=f"{request.method} {request.url.path[:200]}: {error.detail}",
                    headers=error.headers or {},
                )
            case RequestValidationError():
                problem = problem_of(query_error(error.errors()[0]))
            case Overloaded():
                problem = problem_of(
                    error, is_draining=self.is_draining or not self.engine.snapshot().is_ready
                )
            case _:
                problem = problem_of(error)
        if problem.status >= 500:
            _log.error("request %s: %s", request.scope["moesaic"]["request_id"], problem.message)
        return JSONResponse(problem.body(), status_code=problem.status, headers=dict(problem.headers))

    # -- inside ----------------------------------------------------------------------------------------

    async def _body(self, request: Request, models: Mapping[str, type[_M]]) -> _M:
        settings = self.settings
        data = await read_body(request, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
        if len(data) > _LARGE_BODY:
            return await asyncio.to_thread(parse_body, models, data)
        return parse_body(models, data)

    async def _answer(self, request: Request, make: Callable[[Arrival], Job]) -> Response:
        notes = request.scope["moesaic"]
        arrival = Arrival(request_id=notes["request_id"], monotonic_s=notes["arrival_s"])
        # Templates and long prompts take their time: not on the event loop.
        job = await asyncio.to_thread(make, arrival)
        generation = self._runner.start(job)
        replies = ReplyMaker(
            job,
            generation.readers,
            model_name=self.settings.model_name,
            fingerprint=self._fingerprint,
        )
        deltas = generation.deltas()
        headers = {} if job.cut_to is None else {MAX_TOKENS_HEADER: str(job.cut_to)}
        try:
            if job.is_stream:
                # Errors up to the first delta have a status of their own.
                first = await until_gone(request.receive, anext(deltas))
                return EventStream(first, deltas, replies, has_usage=job.has_stream_usage, headers=headers)
            found = await until_gone(request.receive, _collect(deltas))
        except BaseException:
            await deltas.aclose()
            raise
        notes |= replies.notes()
        return Response(replies.full(found), media_type="application/json", headers=headers)

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self.settings.model_name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "moesaic",
            "max_model_len": self.engine.max_model_len,
        }


async def _collect(deltas: AsyncGenerator[Delta, None]) -> list[Delta]:
    return [delta async for delta in deltas]
