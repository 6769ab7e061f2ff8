"""Paths that the router answers itself: what probes and balancers ask, and the list of models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Send

import tokenmill
from tokenmill.entrypoints.http.auth import Headers
from tokenmill.entrypoints.router.backend import Backend
from tokenmill.entrypoints.router.checks import models_of, own_key
from tokenmill.entrypoints.router.exchange import upstream_headers
from tokenmill.entrypoints.router.state import RouterState
from tokenmill.entrypoints.router.upstream import Headers as SentHeaders
from tokenmill.entrypoints.router.upstream import UpstreamError
from tokenmill.errors import ModelNotFoundError, shown

_MODELS = "/v1/models"

Answer = Callable[[RouterState, str, Headers, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class OwnPath:
    """How a path is answered."""

    name: str
    answer: Answer
    methods: tuple[str, ...] = ("GET", "HEAD")


def handler_of(path: str) -> OwnPath | None:
    """None for a path that belongs to the backends."""
    if path.startswith(f"{_MODELS}/"):
        return _PATHS[_MODELS]
    return _PATHS.get(path)


async def reply_json(send: Send, value: Any, status: int = 200) -> None:
    """A whole answer."""
    await _reply(send, msgspec.json.encode(value), "application/json", status)


async def _reply(send: Send, body: bytes, media_type: str, status: int = 200) -> None:
    headers = [
        (b"content-type", media_type.encode("ascii")),
        (b"content-length", str(len(body)).encode("ascii")),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _health(state: RouterState, path: str, headers: Headers, send: Send) -> None:
    """The router lives; whether its backends do is another question."""
    await _reply(send, b"", "text/plain")


async def _ready(state: RouterState, path: str, headers: Headers, send: Send) -> None:
    state.check_ready()
    await _reply(send, b"", "text/plain")


async def _version(state: RouterState, path: str, headers: Headers, send: Send) -> None:
    await reply_json(send, {"version": tokenmill.__version__})


async def _load(state: RouterState, path: str, headers: Headers, send: Send) -> None:
    backends = [
        {
            "url": each.url,
            "role": each.role.value,
            "available": each.is_available,
            "in_flight": each.in_flight,
            "models": None if each.models is None else sorted(each.models),
        }
        for each in state.backends
    ]
    await reply_json(send, {"server_load": len(state.active), "backends": backends})


async def _metrics(state: RouterState, path: str, headers: Headers, send: Send) -> None:
    accept = dict(headers).get(b"accept", b"").decode("latin-1")
    body, media_type = state.metrics.exposition(accept)
    await _reply(send, body, media_type)


async def _models(state: RouterState, path: str, headers: Headers, send: Send) -> None:
    """All that the backends have, each name once; what is told of it is what the first one says."""
    able = [each for each in state.backends if each.is_available]
    if not able:
        raise state.no_backend(state.backends)
    lists = await asyncio.gather(*(_ask(state, each, headers) for each in able))
    entries: dict[str, msgspec.Raw] = {}
    for found in lists:
        for name, entry in found.items():
            entries.setdefault(name, entry)
    wanted = path.removeprefix(_MODELS).removeprefix("/")
    if not wanted:
        await reply_json(send, {"object": "list", "data": list(entries.values())})
        return
    if wanted not in entries:
        raise ModelNotFoundError(f"model {shown(wanted)} is served by no backend.")
    await reply_json(send, entries[wanted])


async def _ask(state: RouterState, backend: Backend, headers: Headers) -> dict[str, msgspec.Raw]:
    """One backend's models; with the client's key where the settings have none for the backend."""
    asked: SentHeaders = own_key(backend)
    if backend.api_key is None:
        asked = [
            (name, value)
            for name, value in upstream_headers(state, backend, headers, "models")
            if name in (b"authorization", b"x-api-key")
        ]
    try:
        return await models_of(backend, asked, state.args.health_timeout) or {}
    except UpstreamError:
        return {}


_PATHS = {
    each.name: each
    for each in (
        OwnPath("/health", _health),
        OwnPath("/ready", _ready),
        OwnPath("/ping", _health, ("GET", "HEAD", "POST")),
        OwnPath("/version", _version),
        OwnPath("/load", _load),
        OwnPath("/metrics", _metrics),
        OwnPath(_MODELS, _models),
    )
}
