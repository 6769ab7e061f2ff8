"""Work beside an event loop that nobody waits for at exit."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_daemon_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `call` returns or raises, in a thread of its own.

    Unlike one of a pool, that thread keeps no process alive: Ctrl-C ends a download at once.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not outcome.cancelled():
            setter(value)

    def run() -> None:
        setter: Callable[[Any], None] = outcome.set_result
        value: Any
        try:
            value = call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            setter, value = outcome.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, setter, value)

    threading.Thread(target=run, name=f"tokenmill-{call.__name__}", daemon=True).start()
    return await outcome
