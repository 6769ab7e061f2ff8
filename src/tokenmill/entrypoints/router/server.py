"""A router from its start to its end: socket, first look at the backends, signals, exit code."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from tokenmill.config.route_args import RouteArgs
from tokenmill.entrypoints.http.lifetime import (
    Signals,
    drain,
    first_of,
    let_end,
    make_uvicorn,
    until_listening,
)
from tokenmill.entrypoints.http.listener import Listener, bind
from tokenmill.entrypoints.router.app import create_app
from tokenmill.entrypoints.router.checks import look, watch
from tokenmill.entrypoints.router.state import RouterState, make_router
from tokenmill.observe.service_manager import notify

logger = logging.getLogger(__name__)

Announce = Callable[[RouterState, str, float], None]
"""Called with the state, the address, and the seconds since the start."""


async def run_router(args: RouteArgs, *, announce: Announce) -> int:
    """Serve until a signal; the exit code. Raises `ConfigError` for an address that cannot be had.

    Backends need not be there yet: requests are refused with 503 until one is.
    """
    started = time.monotonic()
    with bind(args) as listener, Signals() as signals:
        state = make_router(args)
        try:
            await signals.unless_stopped(first_look(state))
            if signals.first.is_set():
                return 0
            await _serve(
                state,
                listener,
                signals,
                lambda: announce(state, listener.address, time.monotonic() - started),
            )
        finally:
            state.close()
    return 0


async def first_look(state: RouterState) -> None:
    """Ask every backend once how it is and what it has."""
    await asyncio.gather(*(look(each, state.args, ask_models=True) for each in state.backends))


async def _serve(
    state: RouterState, listener: Listener, signals: Signals, announce: Callable[[], None]
) -> None:
    listener.listen()
    server = make_uvicorn(create_app(state), state.args, date_header=False)  # backends send one
    serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
    watching = watch_all(state)
    try:
        await until_listening(server, serving, listener.address)
        announce()
        notify("READY=1")
        await first_of(serving, signals.first.wait())
        notify("STOPPING=1")
        state.draining = True
        await drain(state.active, state.args.drain_timeout, signals)
        for task in list(state.active):
            task.cancel()
        await let_end(state.active)
    finally:
        for task in watching:
            task.cancel()
        server.should_exit = server.force_exit = True
        await asyncio.gather(serving, *watching, return_exceptions=True)


def watch_all(state: RouterState) -> list[asyncio.Task[None]]:
    """Tasks that keep asking each backend how it is."""
    return [
        asyncio.create_task(watch(each, state.args, state.picker.forget)) for each in state.backends
    ]
