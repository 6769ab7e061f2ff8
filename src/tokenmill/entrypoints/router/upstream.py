"""HTTP/1.1 to one backend: connections that are kept, answers piece by piece as they come.

httptools parses, as it does for the server; nothing of a body is looked at or put together anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast
from urllib.parse import urlsplit

import httptools

from tokenmill.errors import TokenmillError

T = TypeVar("T")
Headers = Sequence[tuple[bytes, bytes]]

_MAX_IDLE = 64
"""Connections that are kept for later requests."""
_HIGH_WATER = 1 << 18
"""Bytes that may wait for a slow client before the backend is no longer read."""
_MAX_HEAD_BYTES = 1 << 17
_NO_BODY = (204, 304)
_HIGHEST_STATUS = 599


class UpstreamError(TokenmillError):
    """A backend has not answered, or not to the end."""

    http_status = 502
    code = "bad_gateway"
    kind = "broken"
    """For the metrics."""


class ConnectError(UpstreamError):
    """It cannot be reached: nothing was sent."""

    http_status = 503
    code = "unavailable"
    kind = "connect"


class DroppedError(UpstreamError):
    """The connection ended before anything of an answer came."""

    kind = "dropped"


class UpstreamTimeoutError(UpstreamError):
    """Nothing came for too long."""

    http_status = 504
    code = "deadline_exceeded"
    kind = "timeout"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a backend is."""

    host: str
    port: int
    path: str | None
    """Of a unix socket."""
    prefix: bytes
    """In front of every path."""
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str) -> Address:
        """`check_url` has found the URL good."""
        parts = urlsplit(url)
        if parts.scheme == "unix":
            return cls("localhost", 80, parts.path, b"", None)
        secure = parts.scheme == "https"
        return cls(
            host=parts.hostname or "",
            port=parts.port or (443 if secure else 80),
            path=None,
            prefix=parts.path.rstrip("/").encode("ascii"),
            tls=ssl.create_default_context() if secure else None,
        )

    @property
    def authority(self) -> bytes:
        """For the `Host` header."""
        host = b"[%s]" % self.host.encode() if ":" in self.host else self.host.encode("idna")
        return b"%s:%d" % (host, self.port)


class _Connection(asyncio.Protocol):
    """One connection and, at a time, one exchange on it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._news = asyncio.Event()
        self.is_open = True
        self.has_served = False
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._pieces: deque[bytes] = deque()
        self._num_waiting = 0
        self._num_head_bytes = 0
        self._is_paused = False
        self._until_eof = False
        self._head_done = False
        self.is_complete = False
        self.has_begun = False
        self._may_follow = False
        self._failed = False

    # ---- asyncio ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.has_begun = True
        if self.is_complete:  # more than was asked for
            self.abort()
            return
        if not self._head_done:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._failed = True
            self.abort()
        if not self._head_done and self._num_head_bytes > _MAX_HEAD_BYTES:
            self._failed = True
            self.abort()
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._until_eof and self._head_done and exc is None and not self._failed:
            self.is_complete = True
        self._news.set()

    # ---- httptools --------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.is_complete:  # a second answer in the same breath is nobody's
            raise ValueError("more than was asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:  # else it is one behind the body, about which nobody is told
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:  # "go on": the answer is still to come
            self.headers.clear()
            return
        if self.status > _HIGHEST_STATUS:
            raise ValueError("no status of HTTP")
        names = {name for name, _ in self.headers}
        has_end = names & {b"content-length", b"transfer-encoding"}
        self._until_eof = not has_end and self.status not in _NO_BODY
        self._head_done = True

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._num_waiting += len(data)
        if self._num_waiting > _HIGH_WATER and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.status >= 200:
            self.is_complete = True
            self._may_follow = self._parser.should_keep_alive()

    # ---- for an exchange --------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Begin an exchange."""
        if self.has_served:
            self._begin()
        self._transport.write(data)

    async def head(self) -> None:
        """Wait until status and headers are there. Raises `UpstreamError`."""
        while not self._head_done:
            if self._failed:
                raise UpstreamError("the backend's answer is not HTTP/1.1.")
            if not self.is_open:
                if not self.has_begun:
                    raise DroppedError("the backend closed the connection without an answer.")
                raise UpstreamError("the backend closed the connection within its answer.")
            await self._wait()

    async def piece(self) -> bytes:
        """What has come of the body since; nothing at its end. Raises `UpstreamError`."""
        while not self._pieces:
            if self.is_complete:
                return b""
            if not self.is_open or self._failed:
                raise UpstreamError("the backend closed the connection within its answer.")
            await self._wait()
        data = b"".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
        self._pieces.clear()
        self._num_waiting = 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    @property
    def is_reusable(self) -> bool:
        """Whether another exchange may follow."""
        return (
            self.is_open
            and self.is_complete
            and not self._pieces
            and self._may_follow
            and not self._transport.is_closing()
        )

    def abort(self) -> None:
        """Close at once: the backend notices that nobody waits."""
        self.is_open = False
        self._transport.abort()
        self._news.set()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()


class Answer:
    """A backend's answer whose head has come."""

    def __init__(self, upstream: Upstream, connection: _Connection, timeout: float) -> None:
        self._upstream = upstream
        self._connection = connection
        self._timeout = timeout
        self.status = connection.status
        self.headers: list[tuple[bytes, bytes]] = connection.headers

    def header(self, name: bytes) -> bytes | None:
        """A header's value; `name` in lower case."""
        return next((value for each, value in self.headers if each == name), None)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises `UpstreamError`."""
        while data := await _in_time(self._connection.piece(), self._timeout):
            yield data

    async def body(self, most: int) -> bytes:
        """The whole body. Raises `UpstreamError` if it has more than `most` bytes, or breaks."""
        parts: list[bytes] = []
        size = 0
        async for piece in self.pieces():
            parts.append(piece)
            size += len(piece)
            if size > most:
                raise UpstreamError(f"the backend's answer has more than {most} bytes.")
        return b"".join(parts)

    def close(self) -> None:
        """Keep the connection for another exchange, or end it if this one is not over."""
        self._upstream._give_back(self._connection)


class Upstream:
    """The connections to one backend. Used by one event loop."""

    def __init__(self, url: str, *, connect_timeout: float) -> None:
        self.address = Address.of(url)
        self._connect_timeout = connect_timeout
        self._idle: deque[_Connection] = deque()

    async def request(
        self, method: bytes, target: bytes, headers: Headers, body: bytes, *, timeout: float
    ) -> Answer:
        """Send a request and wait for the head of its answer, which is to be closed.

        `headers` are without `Host` and `Content-Length`; `timeout` is in seconds between two signs
        of life. Raises `UpstreamError`; a kept connection that was closed meanwhile is no reason.
        """
        head = [method, b" ", self.address.prefix, target, b" HTTP/1.1\r\nhost: "]
        head += [self.address.authority, b"\r\n"]
        for name, value in headers:
            head += [name, b": ", value, b"\r\n"]
        if body or method not in (b"GET", b"DELETE"):
            head.append(b"content-length: %d\r\n" % len(body))
        data = b"".join([*head, b"\r\n", body])
        kept = self._take_idle()
        while True:
            connection = kept or await self._connect()
            try:
                connection.send(data)
                await _in_time(connection.head(), timeout)
            except DroppedError:
                if kept is None:
                    raise
                kept = None  # it was closed before it had this; a new one is not
                continue
            except BaseException:
                connection.abort()
                raise
            return Answer(self, connection, timeout)

    def close(self) -> None:
        """Close what is kept."""
        while self._idle:
            self._idle.popleft().abort()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop, address = asyncio.get_running_loop(), self.address
        try:
            async with asyncio.timeout(self._connect_timeout):
                if address.path is not None:
                    _, made = await loop.create_unix_connection(_Connection, address.path)
                else:
                    _, made = await loop.create_connection(
                        _Connection, address.host, address.port, ssl=address.tls
                    )
        except TimeoutError as error:
            raise ConnectError(
                f"the backend could not be reached within {self._connect_timeout:g} s."
            ) from error
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConnectError(f"the backend cannot be reached: {reason}.") from error
        return made

    def _give_back(self, connection: _Connection) -> None:
        if not connection.is_reusable:
            connection.abort()
            return
        connection.has_served = True
        self._idle.append(connection)
        if len(self._idle) > _MAX_IDLE:
            self._idle.popleft().abort()


async def _in_time(waiting: Awaitable[T], seconds: float) -> T:
    """What is waited for. Raises `UpstreamTimeoutError`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await waiting
    raise UpstreamTimeoutError(
        f"nothing came from the backend for {seconds:g} s (backend_timeout)."
    )
