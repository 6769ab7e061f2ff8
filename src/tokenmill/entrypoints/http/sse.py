"""Answers that are computed while their client is watched: a stream of events, or one body.

Both end the work as soon as the client goes away. A stream sends its status with its first piece,
so that whatever is refused before the first token is an error with a status of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.entrypoints.http.errors import (
    ClientDisconnectedError,
    UnavailableError,
    error_body,
)
from tokenmill.entrypoints.http.middleware import log_unforeseen
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.http.state import ServerState
from tokenmill.errors import TokenmillError

DONE = b"data: [DONE]\n\n"
_COMMENT = b": still working\n\n"

Write = Callable[[bytes], Awaitable[None]]
"""Sends one or several whole frames."""


def frame(data: bytes) -> bytes:
    """One event; JSON has no line breaks that would end it early."""
    return b"data: " + data + b"\n\n"


class Wire:
    """How a stream says what is no part of an answer. This is OpenAI's way for chats."""

    end = DONE
    """Closes every stream, whatever happens."""
    keep_alive = _COMMENT

    async def failure(self, error: Exception) -> bytes:
        """The frame before the end of a stream that has begun and went wrong."""
        return frame(error_body(error))


class _Answer(Response):
    """Runs `_work` in a task of its own until it is done or the client has gone."""

    def __init__(self, state: ServerState, record: RequestRecord) -> None:
        self._state = state
        self._record = record
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(send))
        gone = asyncio.create_task(_disconnected(receive))
        self._state.active.add(work)
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnectedError
            if work.cancelled():
                raise _stopping()
            work.result()
        finally:
            gone.cancel()
            work.cancel()
            # Its requests are out of the engine before the client's connection is forgotten.
            await asyncio.wait({work})
            self._state.active.discard(work)
            if not work.cancelled():
                work.exception()  # it was raised above, or has nobody to hear it any more

    async def _work(self, send: Send) -> None:
        raise NotImplementedError


class JsonAnswer(_Answer):
    """One JSON body."""

    def __init__(
        self, state: ServerState, record: RequestRecord, make: Callable[[], Awaitable[bytes]]
    ) -> None:
        super().__init__(state, record)
        self._make = make

    async def _work(self, send: Send) -> None:
        body = await self._make()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send(_start(headers))
        await send({"type": "http.response.body", "body": body})


class EventStream(_Answer):
    """Server-sent events, ended as their clients expect it whatever happens."""

    def __init__(
        self,
        state: ServerState,
        record: RequestRecord,
        produce: Callable[[Write], Awaitable[None]],
        wire: Wire,
    ) -> None:
        """`produce` writes all frames but the last; errors that it raises become a frame."""
        super().__init__(state, record)
        self._wire = wire
        self._produce = produce
        self._last_write = 0.0
        self._send: Send
        self._loop: asyncio.AbstractEventLoop

    async def _work(self, send: Send) -> None:
        self._send, self._loop = send, asyncio.get_running_loop()
        self._last_write = self._loop.time()
        keeping_alive = asyncio.create_task(self._keep_alive())
        try:
            await self._produce(self._write)
            await self._write(self._wire.end)
        except asyncio.CancelledError:
            if not self._state.stopping:
                raise
            await self._fail(_stopping())
        except Exception as error:  # noqa: BLE001 - a client waits for word of it
            await self._fail(error)
        finally:
            keeping_alive.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, data: bytes) -> None:
        if self._record.status == 0:
            await self._begin()
        self._last_write = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _begin(self) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would hold pieces back
        ]
        await self._send(_start(headers))

    async def _fail(self, error: Exception) -> None:
        """Before the first piece: as a status. Later: as a frame, and the end."""
        if self._record.status == 0:
            raise error
        if not isinstance(error, TokenmillError):
            log_unforeseen(error, self._record)
        self._record.code = getattr(error, "code", None) or "internal_error"
        await self._write(await self._wire.failure(error) + self._wire.end)

    async def _keep_alive(self) -> None:
        """A sign of life whenever nothing has been written for a while."""
        interval = self._state.args.stream_keep_alive
        loop = self._loop
        while True:
            await asyncio.sleep(interval - (loop.time() - self._last_write))
            if loop.time() - self._last_write >= interval:
                await self._write(self._wire.keep_alive)


def _start(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": list(headers)}


def _stopping() -> UnavailableError:
    return UnavailableError("the server is stopping; the request was ended.")


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
