"""The description of the interface: schemas from the structs that bodies are decoded into."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

import tokenmill
from tokenmill.entrypoints.http.adapter_protocol import ADAPTER_STRUCTS
from tokenmill.entrypoints.http.admin_protocol import UpdateWeightsRequest
from tokenmill.entrypoints.http.errors import STATUS_TEXT
from tokenmill.entrypoints.http.messages.protocol import MESSAGES_STRUCTS
from tokenmill.entrypoints.http.pooling_protocol import POOLING_STRUCTS
from tokenmill.entrypoints.http.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tokenmill.entrypoints.http.replies import (
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    ErrorReply,
    Model,
    ModelList,
    TokenizeReply,
)
from tokenmill.entrypoints.http.responses.protocol import RESPONSES_STRUCTS
from tokenmill.entrypoints.http.unsupported import UNSUPPORTED

_STRUCTS = [
    CompletionRequest,
    ChatCompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    CompletionReply,
    ChatReply,
    TokenizeReply,
    DetokenizeReply,
    Model,
    ModelList,
    ErrorReply,
    UpdateWeightsRequest,
    *POOLING_STRUCTS,
    *ADAPTER_STRUCTS,
    *MESSAGES_STRUCTS,
    *RESPONSES_STRUCTS,
]
_REFERENCE = "#/components/schemas/{name}"
_GENERATING = (400, 404, 408, 413, 415, 429, 500, 503, 504)

Responses = dict[int | str, dict[str, Any]]


def json_body(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Extra of a route whose body is this struct."""
    return {"requestBody": {"required": True, "content": _json(kind)}}


def replies(
    kind: type[msgspec.Struct],
    *statuses: int,
    stream: bool = False,
    errors: type[msgspec.Struct] = ErrorReply,
) -> Responses:
    """Responses of a route that answers with this struct; `stream` adds events."""
    content = _json(kind)
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    statuses = _GENERATING if stream else statuses
    return {200: {"description": "The answer.", "content": content}, **_errors(statuses, errors)}


def pooling_replies(kind: type[msgspec.Struct]) -> Responses:
    """Responses of a route whose answer is computed, and is this struct."""
    return replies(kind, *_GENERATING)


def plain(text: str, *statuses: int) -> Responses:
    """Responses of a route without a struct."""
    return {200: {"description": text}, **_errors(statuses)}


def _errors(statuses: tuple[int, ...], kind: type[msgspec.Struct] = ErrorReply) -> Responses:
    known: Responses = {
        status: {"description": STATUS_TEXT[status], "content": _json(kind)} for status in statuses
    }
    known["default"] = {"description": "Any other error.", "content": _json(kind)}
    return known


def _json(kind: type[msgspec.Struct]) -> dict[str, Any]:
    reference = _REFERENCE.format(name=kind.__name__)
    return {"application/json": {"schema": {"$ref": reference}}}


def describe(app: FastAPI, *, with_keys: bool) -> dict[str, Any]:
    """The OpenAPI document."""
    document = get_openapi(
        title="tokenmill",
        version=tokenmill.__version__,
        description="OpenAI's protocol in front of one model.",
        routes=app.routes,
    )
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template=_REFERENCE)
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        _add_neutral_fields(schemas[name])
    components = document.setdefault("components", {})
    components["schemas"] = {**components.get("schemas", {}), **schemas}
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _add_neutral_fields(schema: dict[str, Any]) -> None:
    """Fields that are known but not supported, with the values that are taken nevertheless."""
    for name, neutral in UNSUPPORTED.items():
        schema["properties"][name] = {
            "description": "Not supported; other values are refused.",
            "enum": [None, *neutral],
        }
