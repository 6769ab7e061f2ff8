"""A router from its start to its end: socket, first look at the backends, signals, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import uvicorn

from tokenmill.config.route_args import RouteArgs
from tokenmill.entrypoints.http.connection import connection_class
from tokenmill.entrypoints.http.lifetime import QuietServer, Signals, first_of
from tokenmill.entrypoints.http.listener import Listener, bind
from tokenmill.entrypoints.router.app import create_app
from tokenmill.entrypoints.router.checks import look, watch
from tokenmill.entrypoints.router.state import RouterState, make_router
from tokenmill.errors import ConfigError
from tokenmill.observe.service_manager import notify

logger = logging.getLogger(__name__)

_KEEP_CONNECTIONS = 75
"""Seconds that an idle connection of a client is kept."""
_GRACE = 5.0
"""Seconds that ended requests get to tell their clients."""

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
    server = make_uvicorn(state)
    serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
    watching = watch_all(state)
    try:
        while not (server.started or serving.done()):
            await asyncio.sleep(0.01)
        if serving.done():
            raise ConfigError(f"cannot listen on {listener.address}: {serving.exception()}.")
        announce()
        notify("READY=1")
        await first_of(serving, signals.first.wait())
        notify("STOPPING=1")
        await _drain(state, signals)
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


def make_uvicorn(state: RouterState) -> uvicorn.Server:
    """Uvicorn around the router's application, without signal handlers of its own."""
    args = state.args
    config = uvicorn.Config(
        create_app(state),
        http=connection_class(args.max_header_bytes),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,  # backends send one
        proxy_headers=False,
        root_path=args.root_path,
        timeout_keep_alive=_KEEP_CONNECTIONS,
        timeout_graceful_shutdown=1,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
    )
    return QuietServer(config)


async def _drain(state: RouterState, signals: Signals) -> None:
    """Take no more requests and wait for those that run; what is left then ends with an error."""
    state.draining = True
    timeout = state.args.drain_timeout
    logger.info(
        "stopping: %d requests may finish within %g s; another signal ends them now",
        len(state.active),
        timeout,
    )
    finished = asyncio.create_task(_idle(state))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await first_of(finished, signals.second.wait())
    for task in list(state.active):
        task.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GRACE):
            await finished
    await asyncio.sleep(0)  # answers are written


async def _idle(state: RouterState) -> None:
    while state.active:
        await asyncio.wait(list(state.active))
