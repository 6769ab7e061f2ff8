"""Signals, and how servers end on them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import uvicorn

T = TypeVar("T")


class QuietServer(uvicorn.Server):
    """Leaves signals to `Signals`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
