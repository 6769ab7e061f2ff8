"""The router's paths: its own, those that go to one backend, and those that go to all.

A plain ASGI application: bodies and answers pass through it, so there is nothing to decode.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.entrypoints.http.auth import OPEN_PATHS
from tokenmill.entrypoints.http.error_shapes import error_shape
from tokenmill.entrypoints.http.errors import (
    BodyTooLargeError,
    ClientDisconnectedError,
    MethodNotAllowedError,
    NotFoundError,
    SlowBodyError,
    UnavailableError,
    error_headers,
)
from tokenmill.entrypoints.http.middleware import log_request, log_unforeseen, route_path
from tokenmill.entrypoints.http.record import (
    ANSWERED_HEADERS,
    CLIENT_GONE,
    RequestRecord,
    request_id_of,
)
from tokenmill.entrypoints.router import own_paths
from tokenmill.entrypoints.router.broadcast import BROADCAST, broadcast
from tokenmill.entrypoints.router.disaggregation import run_pair
from tokenmill.entrypoints.router.exchange import Exchange, Inbound
from tokenmill.entrypoints.router.routing_keys import read_keys
from tokenmill.entrypoints.router.state import NoBackendError, RouterState
from tokenmill.errors import TokenmillError, shown

_ROUTED = (
    "/v1/", "/v2/", "/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank",
    "/generative_scoring", "/invocations", "/inference/v1/",
)  # fmt: skip
"""Beginnings of the paths that go to one backend; others are nobody's."""
_METHODS = ("GET", "POST", "DELETE")
_LABELLED = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
    "/pooling", "/classify", "/score", "/rerank", "/tokenize", "/detokenize",
)  # fmt: skip
"""Paths with a label of their own in metrics."""


def create_app(state: RouterState) -> ASGIApp:
    """The application of one router."""
    app: ASGIApp = RouterApp(state)
    if state.args.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=state.args.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=list(ANSWERED_HEADERS),
        )
    return app


class RouterApp:
    """Answers whatever happens, and notes what did."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError("the router speaks HTTP only")
        record = RequestRecord(request_id_of(scope["headers"]), scope["method"], scope["path"])
        path = route_path(scope)
        exchange = _Client(self._state, record, path, scope, receive, send)
        try:
            if path not in OPEN_PATHS:
                record.key_name = self._state.keys.check(scope["headers"])
            await exchange.run()
        except ClientDisconnectedError:
            record.status, record.code = CLIENT_GONE, "client_disconnected"
        except Exception as error:  # noqa: BLE001 - the last one who can answer
            await exchange.fail(error)
        finally:
            self._state.metrics.count_request(record, exchange.handler)
            if self._state.args.log_requests:
                log_request(record, backend=exchange.backend_url)


class _Client:
    """One request of a client, from its head to its answer."""

    def __init__(
        self,
        state: RouterState,
        record: RequestRecord,
        path: str,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._state = state
        self._record = record
        self._path = path
        self._shape = error_shape(path)
        self._scope = scope
        self._receive = receive
        self._raw_send = send
        self._exchange: Exchange | None = None
        self.handler = "other"
        """The path, if it is one of a few: a label of metrics."""

    @property
    def backend_url(self) -> str | None:
        """Who had the request."""
        backend = None if self._exchange is None else self._exchange.backend
        return None if backend is None else backend.url

    async def run(self) -> None:
        """Answer it. Raises what is to be told in place of an answer."""
        method, state = self._scope["method"], self._state
        own = own_paths.handler_of(self._path)
        if own is not None:
            self.handler = own.name
            if method not in own.methods:
                raise MethodNotAllowedError(f"{shown(self._path)} does not take {shown(method)}.")
            await own.answer(state, self._path, self._scope["headers"], self._send)
            return
        is_known = self._path.startswith(_ROUTED) or self._path in BROADCAST
        if not is_known or ".." in self._path.split("/"):  # a backend might take that elsewhere
            raise NotFoundError(f"there is no {shown(self._path)} behind this router.")
        if method not in _METHODS:
            raise MethodNotAllowedError(f"{shown(self._path)} does not take {shown(method)}.")
        self.handler = self._path if self._path in _LABELLED else "routed"
        with state.entered():
            await self._watched(self._routed(await self._read()))

    async def _routed(self, inbound: Inbound) -> None:
        if self._path in BROADCAST:
            await broadcast(self._state, self._record, inbound, self._send)
            return
        if self._state.args.prefill:
            self._exchange = await run_pair(
                self._state, self._record, inbound, self._send, self._path
            )
            return
        self._exchange = Exchange(self._state, self._record, inbound, self._send)
        await self._exchange.run()

    async def _read(self) -> Inbound:
        """The request with its body. Raises `BodyTooLargeError`, `SlowBodyError`."""
        args, headers = self._state.args, self._scope["headers"]
        try:
            async with asyncio.timeout(args.body_timeout):
                body = await self._body()
        except TimeoutError as error:
            raise SlowBodyError(
                f"the body did not arrive within {args.body_timeout:g} s (body_timeout)."
            ) from error
        query = self._scope["query_string"]
        target = self._scope.get("raw_path") or self._scope["path"].encode()
        root = self._scope.get("root_path", "").encode()
        target = target.removeprefix(root) + (b"?" + query if query else b"")
        keys = read_keys(body, headers, args.session_header, self._path)
        return Inbound(self._scope["method"].encode("ascii"), target, headers, body, keys)

    async def _body(self) -> bytes:
        limit, parts, size = self._state.args.max_body_bytes, [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise BodyTooLargeError(
                    f"the body has more than {limit} bytes (max_body_bytes); send less at a time."
                )
            parts.append(piece)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        """Run until it is done, or the client has gone: then its backend is told at once."""
        task = asyncio.create_task(work)
        gone = asyncio.create_task(self._disconnected())
        self._state.active.add(task)
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnectedError
            if task.cancelled():
                raise UnavailableError("the router is stopping; the request was ended.")
            task.result()
        finally:
            gone.cancel()
            task.cancel()
            await asyncio.wait({task})
            self._state.active.discard(task)
            if not task.cancelled():
                task.exception()  # it was raised above, or has nobody to hear it any more

    async def _disconnected(self) -> None:
        """Returns when the client has gone."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._record.status = message["status"]
            there = {name for name, _ in message["headers"]}
            own = self._record.request_id.encode("ascii")
            names = [name for name in self._shape.id_headers if name not in there]
            message["headers"] = [*message["headers"], *((name, own) for name in names)]
        await self._raw_send(message)

    async def fail(self, error: Exception) -> None:
        """Tell the client what went wrong, if nothing was sent to it yet."""
        record = self._record
        if not isinstance(error, TokenmillError):
            log_unforeseen(error, record)
        record.code = getattr(error, "code", None) or "internal_error"
        if record.status:  # that an answer has no end tells the client
            raise RuntimeError("a response was cut off") from None
        shape = self._shape
        body = shape.body(error, record.request_id)
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        headers |= error_headers(error)
        if isinstance(error, NoBackendError):
            headers["retry-after"] = str(math.ceil(error.retry_after))
        pairs = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
        start = {"type": "http.response.start", "status": shape.status(error), "headers": pairs}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})
