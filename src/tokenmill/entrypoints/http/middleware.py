"""Around every request: its id, its key, its log line, and an answer whatever happens."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.entrypoints.http.auth import OPEN_PATHS
from tokenmill.entrypoints.http.error_shapes import ErrorShape, error_shape
from tokenmill.entrypoints.http.errors import ClientDisconnectedError, error_headers
from tokenmill.entrypoints.http.record import (
    CLIENT_GONE,
    RequestRecord,
    data_parallel_rank_of,
    request_id_of,
)
from tokenmill.entrypoints.http.state import ServerState
from tokenmill.errors import TokenmillError

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("tokenmill.access")

_MAX_SHOWN_PATH = 200


class RequestMiddleware:
    """Plain ASGI: a response passes through it at the cost of one call per piece."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(request_id_of(scope["headers"]), scope["method"], scope["path"])
        scope["tokenmill.record"] = record
        shape = error_shape(route_path(scope))
        request_id = record.request_id.encode("ascii")
        ids = [(name, request_id) for name in shape.id_headers]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], *ids]
            await send(message)

        try:
            if route_path(scope) not in OPEN_PATHS:
                record.key_name = self._state.keys.check(scope["headers"])
            record.trace_context = self._state.traces.context_of(scope["headers"])
            record.data_parallel_rank = data_parallel_rank_of(scope["headers"])
            await self._app(scope, receive, send_with_id)
        except ClientDisconnectedError:
            record.status, record.code = CLIENT_GONE, "client_disconnected"
        except Exception as error:  # noqa: BLE001 - the last one who can answer
            await _answer(error, record, shape, send_with_id)
        finally:
            self._note(record, scope)

    def _note(self, record: RequestRecord, scope: Scope) -> None:
        route = scope.get("route")
        self._state.metrics.count_request(record, getattr(route, "path", "other"))
        if self._state.args.log_requests:
            log_request(record)


def log_request(record: RequestRecord, **more: object) -> None:
    """One line, as `name=value` pairs; the JSON format has the values as fields."""
    values = record.fields() | more
    values["path"] = str(values["path"])[:_MAX_SHOWN_PATH].encode("unicode_escape").decode("ascii")
    text = " ".join(f"{name}={value}" for name, value in values.items())
    access_logger.info("%s", text, extra={"fields": values})


def route_path(scope: Scope) -> str:
    """The path without the prefix of a proxy."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def _answer(error: Exception, record: RequestRecord, shape: ErrorShape, send: Send) -> None:
    if not isinstance(error, TokenmillError):
        log_unforeseen(error, record)
    started = record.status != 0
    record.code = getattr(error, "code", None) or "internal_error"
    if started:  # part of an answer is out; that it has no end tells the client
        raise RuntimeError("a response was cut off") from None
    await _send_error(error, record.request_id, shape, send)


def log_unforeseen(error: Exception, record: RequestRecord) -> None:
    """Where it happened, and of which kind it is; its message is left out: it may hold a prompt."""
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request %s failed: %s\n%s", record.request_id, type(error).__name__, where)


async def _send_error(error: Exception, request_id: str, shape: ErrorShape, send: Send) -> None:
    """A whole response that says what went wrong."""
    body = shape.body(error, request_id)
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    pairs = {**headers, **error_headers(error)}.items()
    start: dict[str, Any] = {
        "type": "http.response.start",
        "status": shape.status(error),
        "headers": [(name.encode("ascii"), value.encode("ascii")) for name, value in pairs],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})
