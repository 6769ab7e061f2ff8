"""A small HTTP/1.1 client that tells when each piece of an answer came.

Written for measuring: nothing between the socket and the clock, and little of the processor that
the server may share.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from tokenmill.errors import TokenmillError

_PIECE = 1 << 16


class HttpFailureError(TokenmillError):
    """A server cannot be reached, or does not answer as HTTP/1.1 does."""

    code = "http_failure"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server is."""

    host: str
    port: int
    prefix: str
    """Path in front of every path."""
    tls: ssl.SSLContext | None
    api_key: str | None = None

    @classmethod
    def of(cls, url: str, api_key: str | None) -> Target:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        return cls(
            host=parts.hostname or "127.0.0.1",
            port=parts.port or (443 if secure else 80),
            prefix=parts.path.rstrip("/"),
            tls=ssl.create_default_context() if secure else None,
            api_key=api_key,
        )


@dataclass(slots=True)
class Answer:
    """A response as it comes."""

    status: int
    pieces: AsyncIterator[tuple[float, bytes]]
    """(clock, bytes) of the body, chunks put together."""

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([piece async for _, piece in self.pieces])


@contextlib.asynccontextmanager
async def request(
    target: Target, method: str, path: str, body: bytes = b""
) -> AsyncIterator[Answer]:
    """Send a request on a connection of its own. Raises `HttpFailureError`."""
    try:
        reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls)
    except OSError as error:
        raise HttpFailureError(
            f"no server at {target.host}:{target.port}: {error.strerror or error}."
        ) from error
    try:
        key = f"authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        head = (
            f"{method} {target.prefix}{path} HTTP/1.1\r\nhost: {target.host}:{target.port}\r\n"
            f"content-type: application/json\r\naccept: */*\r\ncontent-length: {len(body)}\r\n"
            f"{key}connection: close\r\n\r\n"
        )
        writer.write(head.encode("latin-1") + body)
        await writer.drain()
        status, headers = await _head(reader)
        chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        yield Answer(status, _chunks(reader) if chunked else _plain(reader, headers))
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise HttpFailureError(f"the connection broke: {type(error).__name__} {error}.") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].split(b"\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    return int(first.split(b" ")[1]), headers


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[tuple[float, bytes]]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        piece = await reader.readexactly(size + 2)
        yield time.perf_counter(), piece[:-2]


async def _plain(
    reader: asyncio.StreamReader, headers: dict[bytes, bytes]
) -> AsyncIterator[tuple[float, bytes]]:
    length = headers.get(b"content-length")
    if length is not None:
        yield time.perf_counter(), await reader.readexactly(int(length))
        return
    while piece := await reader.read(_PIECE):
        yield time.perf_counter(), piece


async def events(answer: Answer) -> AsyncIterator[tuple[float, bytes]]:
    """(clock, data) of each server-sent event; the clock is that of its last byte."""
    rest = b""
    async for clock, piece in answer.pieces:
        *blocks, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in blocks:
            lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield clock, b"\n".join(lines)
