"""The OpenAPI description of bodies that are read by `body.py` and not by the framework."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema


class ErrorDetail(BaseModel):
    """What went wrong, as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


MAX_TOKENS_HEADER = "x-moesaic-max-tokens"
_REF = "#/components/schemas/{model}"


def body_of(*models: type[BaseModel]) -> dict[str, Any]:
    """What `openapi_extra` says of a route that takes one of these bodies."""
    refs = [{"$ref": _REF.format(model=model.__name__)} for model in models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def streamed(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """What `responses` says of a route that may answer with events, each of them a chunk."""
    ref = {"$ref": _REF.format(model=chunk.__name__)}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": ref}
    either = {"anyOf": [{"const": "[DONE]"}, data]}
    event = {"type": "object", "properties": {"data": either}, "required": ["data"]}
    cut = {
        "description": "Only where max_tokens is more than the context leaves after the longest prompt: the "
        "number of tokens that it leaves, which is the limit in force.",
        "schema": {"type": "integer"},
    }
    return {200: {"content": {"text/event-stream": {"schema": event}}, "headers": {MAX_TOKENS_HEADER: cut}}}


def install_schemas(app: FastAPI, models: list[type[BaseModel]]) -> None:
    """Put the schemas of these bodies into the application's OpenAPI document."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = plain()
            for route in document["paths"].values():
                for operation in route.values():
                    operation["responses"].pop("422", None)  # wrong parameters are answered with 400 here
            for name in ("HTTPValidationError", "ValidationError"):
                document["components"]["schemas"].pop(name, None)
            _, definitions = models_json_schema(
                [(model, "validation") for model in models], ref_template=_REF
            )
            document["components"]["schemas"].update(definitions["$defs"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
