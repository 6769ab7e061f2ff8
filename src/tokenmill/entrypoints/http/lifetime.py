"""What servers have in common: signals, how they end on them, the library that listens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Collection, Iterator
from typing import Protocol, TypeVar

import uvicorn
from starlette.types import ASGIApp

from tokenmill.entrypoints.http.connection import connection_class
from tokenmill.errors import ConfigError

logger = logging.getLogger(__name__)

_KEEP_CONNECTIONS = 75
"""Seconds that an idle connection is kept; longer than the usual clients keep theirs."""
_GRACE = 5.0
"""Seconds that ended requests get to tell their clients."""

T = TypeVar("T")


class HttpSettings(Protocol):
    """What the library is told."""

    @property
    def max_header_bytes(self) -> int: ...

    @property
    def root_path(self) -> str: ...

    @property
    def ssl_certfile(self) -> str | None: ...

    @property
    def ssl_keyfile(self) -> str | None: ...


class QuietServer(uvicorn.Server):
    """Leaves signals to `Signals`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_uvicorn(
    app: ASGIApp, settings: HttpSettings, *, date_header: bool = True
) -> uvicorn.Server:
    """Uvicorn around an application, without signal handlers of its own."""
    config = uvicorn.Config(
        app,
        http=connection_class(settings.max_header_bytes),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=date_header,
        proxy_headers=False,
        root_path=settings.root_path,
        timeout_keep_alive=_KEEP_CONNECTIONS,
        timeout_graceful_shutdown=1,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    return QuietServer(config)


async def until_listening(
    server: uvicorn.Server, serving: asyncio.Task[None], address: str
) -> None:
    """Wait until a server that was begun takes connections. Raises `ConfigError` if it cannot."""
    while not (server.started or serving.done()):
        await asyncio.sleep(0.01)
    if serving.done():
        raise ConfigError(f"cannot listen on {address}: {serving.exception()}.")


async def first_of(*waits: Awaitable[object]) -> None:
    """Return when one of them is done; the others are cancelled, tasks excepted."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait, task in zip(waits, tasks, strict=True):
            if wait is not task:
                task.cancel()


class Signals:
    """SIGINT and SIGTERM as events of the loop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    async def unless_stopped(self, starting: Awaitable[T]) -> T | None:
        """What was started; None if a signal came first, which ends the start."""
        task = asyncio.ensure_future(starting)
        await first_of(task, self.first.wait())
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return None

    def _note(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def drain(active: Collection[asyncio.Task[None]], timeout: float, signals: Signals) -> None:
    """Wait for the requests that run, until they are done, a second signal, or so many seconds."""
    logger.info(
        "stopping: %d requests may finish within %g s; another signal ends them now",
        len(active),
        timeout,
    )
    finished = asyncio.create_task(_idle(active))
    try:
        async with asyncio.timeout(timeout):
            await first_of(finished, signals.second.wait())
    except TimeoutError:
        logger.warning("%d requests did not finish in time and are ended", len(active))
    finally:
        finished.cancel()


async def let_end(active: Collection[asyncio.Task[None]]) -> None:
    """Give requests that were just ended a moment to tell their clients."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GRACE):
            await _idle(active)
    await asyncio.sleep(0)  # responses are written


async def _idle(active: Collection[asyncio.Task[None]]) -> None:
    while active:
        await asyncio.wait(list(active))
