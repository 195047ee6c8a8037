"""The application: which path leads to which function, and what surrounds every request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse

from moesaic import __version__
from moesaic.engine.client import EngineClient
from moesaic.errors import MoesaicError
from moesaic.server.api import Api
from moesaic.server.body import check_query
from moesaic.server.middleware import PROBE_PATHS, Gate, Journal
from moesaic.server.openapi import MAX_TOKENS_HEADER, ErrorBody, body_of, install_schemas, streamed
from moesaic.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    PlacementBody,
    TokenizeBody,
    TokenizeChatBody,
)
from moesaic.server.reply import ChatChunk, ChatCompletion, Completion
from moesaic.server.settings import ServerSettings
from moesaic.text.defaults import SamplingDefaults
from moesaic.text.template import ChatTemplate
from moesaic.text.tokenizer import Tokenizer


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    *,
    template: ChatTemplate | None = None,
    defaults: SamplingDefaults | None = None,
    created_s: int = 0,
) -> FastAPI:
    """The application over a running engine. Several may share one engine.

    `template` None: chat requests are refused with a word on why. `defaults` None: those of `SamplingParams`.
    `created_s` is what /v1/models says.
    """
    api = Api(
        engine,
        tokenizer,
        settings,
        template=template,
        defaults=defaults or SamplingDefaults(),
        created_s=created_s,
    )
    app = FastAPI(
        title="moesaic",
        version=__version__,
        description="OpenAI-compatible API of a Mixture-of-Experts model",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.api = api
    for method, path, endpoint, extra in _routes(api):
        responses = {**_ERRORS, **extra.pop("responses", {})}
        # Probes and scrapers ask with whatever they add.
        checks = [] if path in PROBE_PATHS else [_query_check(_QUERIES.get(path, ()))]
        app.add_api_route(path, endpoint, methods=[method], responses=responses, dependencies=checks, **extra)
    install_schemas(
        app,
        [
            CompletionBody,
            ChatBody,
            TokenizeBody,
            TokenizeChatBody,
            DetokenizeBody,
            PlacementBody,
            ChatChunk,
        ],
    )
    app.add_exception_handler(MoesaicError, api.on_error)
    app.add_exception_handler(HTTPException, api.on_error)
    app.add_exception_handler(RequestValidationError, api.on_error)
    # The last one added is the outermost.
    app.add_middleware(
        Gate,
        api_key=settings.api_key,
        max_concurrent=settings.max_concurrent,
        is_draining=lambda: api.is_draining,
        metrics=api.metrics,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["x-request-id", "Retry-After", MAX_TOKENS_HEADER],
        )
    app.add_middleware(Journal, metrics=api.metrics, routes=app.routes)
    return app


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 415, 429, 500, 503)
}


_QUERIES: Mapping[str, tuple[str, ...]] = {"/v1/internal/experts": ("window_s",)}
"""Parameters that a path's function reads; no other path that is checked has any."""


def _query_check(known: tuple[str, ...]) -> Any:
    def check(request: Request) -> None:
        check_query(request, known)

    return Depends(check)


def _routes(api: Api) -> list[tuple[str, str, Callable[..., Any], dict[str, Any]]]:
    """(method, path, function, what the OpenAPI document says beside its types)."""
    completion = {
        "response_model": Completion,
        "openapi_extra": body_of(CompletionBody),
        "responses": streamed(Completion),
    }
    chat = {
        "response_model": ChatCompletion,
        "openapi_extra": body_of(ChatBody),
        "responses": streamed(ChatChunk),
    }
    metrics = {"response_class": PlainTextResponse}
    placement = {"openapi_extra": body_of(PlacementBody), "responses": {409: {"model": ErrorBody}}}
    return [
        ("POST", "/v1/completions", api.completions, completion),
        ("POST", "/v1/chat/completions", api.chat_completions, chat),
        ("POST", "/tokenize", api.tokenize, {"openapi_extra": body_of(TokenizeBody, TokenizeChatBody)}),
        ("POST", "/detokenize", api.detokenize, {"openapi_extra": body_of(DetokenizeBody)}),
        ("GET", "/v1/models", api.models, {}),
        ("GET", "/v1/models/{model_id:path}", api.model, {}),
        ("GET", "/health", api.health, {}),
        ("GET", "/ready", api.ready, {}),
        ("GET", "/metrics", api.show_metrics, metrics),
        ("GET", "/v1/internal/active", api.active, {}),
        ("GET", "/v1/internal/experts", api.experts, {}),
        ("GET", "/v1/internal/placement", api.placement, {}),
        ("POST", "/v1/internal/placement", api.place, placement),
    ]
