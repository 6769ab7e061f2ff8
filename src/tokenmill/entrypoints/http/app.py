"""Routes and middleware of one server."""

from __future__ import annotations

from functools import cache
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from tokenmill.entrypoints.http import (
    adapters,
    admin,
    chat,
    completions,
    embeddings,
    exposition,
    health,
    models,
    pages,
    scoring,
    tokenization,
)
from tokenmill.entrypoints.http.error_shapes import error_shape
from tokenmill.entrypoints.http.errors import MethodNotAllowedError, NotFoundError
from tokenmill.entrypoints.http.messages import endpoints as messages
from tokenmill.entrypoints.http.middleware import RequestMiddleware, route_path
from tokenmill.entrypoints.http.openapi import describe
from tokenmill.entrypoints.http.record import ANSWERED_HEADERS
from tokenmill.entrypoints.http.responses import endpoints as responses
from tokenmill.entrypoints.http.state import ServerState, record_of, state_of
from tokenmill.entrypoints.pooling import pooling_of
from tokenmill.errors import InvalidRequestError, shown

_GENERATE = (completions, chat, messages, responses)
_POOL = (embeddings, scoring)
_OTHERS = (models, adapters, tokenization, health, admin, exposition, pages)


def create_app(state: ServerState) -> FastAPI:
    """An ASGI application in front of the state's engine.

    FastAPI routes and describes; bodies are decoded and encoded by msgspec, and pages and errors
    are our own.
    """
    app = FastAPI(
        title="tokenmill",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.server = state
    for module in _GENERATE:
        app.include_router(module.router, dependencies=[Depends(_needs_generation)])
    for module in _POOL:
        app.include_router(module.router, dependencies=[Depends(_needs_pooling)])
    for module in _OTHERS:
        app.include_router(module.router)
    app.openapi = cache(  # type: ignore[method-assign]
        lambda: describe(app, with_keys=bool(state.keys))
    )
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_middleware(RequestMiddleware, state=state)
    if state.args.allowed_origins:
        # Outermost: a browser asks for permission without a key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.args.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=list(ANSWERED_HEADERS),
        )
    return app


async def _needs_generation(request: Request) -> None:
    config = state_of(request).engine.config
    if config.model.pooling is not None:
        raise InvalidRequestError(
            f"{config.model.name} is a pooling model and generates nothing; what it can do is:"
            f" {', '.join(config.model.pooling.tasks)}. See POST /v1/embeddings, /classify, /score,"
            f" /rerank and /pooling.",
            parameter="model",
        )


async def _needs_pooling(request: Request) -> None:
    pooling_of(state_of(request).engine.config, shown(request.url.path))


async def _routing_error(request: Request, error: Any) -> Response:
    """What the router finds no route for, in the shape of all errors."""
    assert isinstance(error, HTTPException)  # registered for this class
    path = shown(request.url.path)
    ours: Exception
    if error.status_code == 405:
        ours = MethodNotAllowedError(f"{path} does not take {shown(request.method)}.")
    else:
        ours = NotFoundError(f"there is no {path}.")
    record = record_of(request)
    record.code = getattr(ours, "code", None)
    shape = error_shape(route_path(request.scope))
    return Response(
        shape.body(ours, record.request_id),
        error.status_code,
        headers=dict(error.headers or {}),
        media_type="application/json",
    )
