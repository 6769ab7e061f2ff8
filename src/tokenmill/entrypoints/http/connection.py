"""uvicorn's HTTP/1.1 connection with bounds on what comes before a body: size, and time."""

from __future__ import annotations

import asyncio
import re
import sys
import uuid
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 30.0
"""Time for a request line and its headers, from the first byte or the connection on."""


_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class _HeadTooLargeError(Exception):
    """Request line and headers exceed the limit."""


class BoundedConnection(HttpToolsProtocol):
    """Answers 431 to a head that is too large, and closes a connection that does not bring one."""

    max_head_bytes = 65_536
    head_seconds = HEAD_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._num_head_bytes += len(data)
            data = _without_upgrade(data)
        super().data_received(data)
        if self._in_head and self._num_head_bytes > self.max_head_bytes:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._num_head_bytes = 0
        self._stop_timer()
        sizes = (len(name) + len(value) for name, value in self.headers)
        if len(self.url) + sum(sizes) > self.max_head_bytes:
            raise _HeadTooLargeError
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What could not be parsed; also called for a head that is too large."""
        context = self._head_error()
        if context is not None:
            self._refuse_head()
            return
        self._answer(400, "the request is not HTTP/1.1 that this server understands.", "bad_http")

    def _head_error(self) -> BaseException | None:
        error = sys.exception()
        while error is not None and not isinstance(error, _HeadTooLargeError):
            error = error.__cause__ or error.__context__
        return error

    def _refuse_head(self) -> None:
        self._answer(
            431,
            f"request line and headers have more than {self.max_head_bytes} bytes"
            f" (max_header_bytes).",
            "headers_too_large",
        )

    def _answer(self, status: int, message: str, code: str) -> None:
        """An error without an application, after which the connection ends."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        kind = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = msgspec.json.encode({"error": kind})
        head = (
            f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {uuid.uuid4().hex}\r\n"
            f"connection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._time_is_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_is_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """The head with its `Upgrade` under a name that means nothing.

    Such an offer may be ignored, and Java's client makes it (HTTP/2) in every request; but the
    parser would take the request's body for something in the new protocol, and drop it.
    """
    end = data.find(b"\r\n\r\n")
    end = len(data) if end < 0 else end
    if _UPGRADE.search(data, 0, end) is None:
        return data
    return _UPGRADE.sub(b"\r\nx-upgrade:", data[:end]) + data[end:]


def connection_class(max_head_bytes: int) -> type[BoundedConnection]:
    """The connection with this limit."""
    return type("Connection", (BoundedConnection,), {"max_head_bytes": max_head_bytes})
