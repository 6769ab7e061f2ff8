"""A server from its start to its end: socket, engine, signals, exit code.

bind            before the model is loaded, so that a port in use is known at once
start           the engine; nobody is listened to before it is ready
serve           until a signal, or the engine's death
drain           no new requests; those that run may finish, until `drain_timeout` or a second
                signal, then they end with an error
end             exit code 0 after a signal, `EXIT_ENGINE_DEAD` after the engine's death
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable

from tokenmill.config.serve_args import ServeArgs
from tokenmill.engine.daemon_thread import in_daemon_thread
from tokenmill.engine.serve_options import ServeOptions
from tokenmill.entrypoints.http.adapters import load_first_adapters, parse_adapters
from tokenmill.entrypoints.http.app import create_app
from tokenmill.entrypoints.http.engine import Engine
from tokenmill.entrypoints.http.lifetime import (
    Signals,
    drain,
    first_of,
    let_end,
    make_uvicorn,
    until_listening,
)
from tokenmill.entrypoints.http.listener import Listener, bind
from tokenmill.entrypoints.http.load_lines import write_load_lines
from tokenmill.entrypoints.http.state import ServerState, make_state
from tokenmill.observe.service_manager import notify

logger = logging.getLogger(__name__)

EXIT_ENGINE_DEAD = 3
"""The engine died too often to be started again."""
_GC_THRESHOLD = 50_000
"""Objects between two collections of the youngest generation; a token makes a few."""

Announce = Callable[[ServerState, str, float], None]
"""Called with the state, the address, and the seconds since the start."""


async def run_server(
    args: ServeArgs,
    options: ServeOptions,
    start_engine: Callable[[], Awaitable[Engine]],
    *,
    chat_template: str | None = None,
    announce: Announce,
) -> int:
    """Serve until a signal or the engine's death; the exit code.

    Raises `ConfigError` for an address that cannot be had, and what `start_engine` raises.
    """
    started = time.monotonic()
    with bind(args) as listener, Signals() as signals:
        engine = await signals.unless_stopped(start_engine())
        if engine is None:
            return 0
        try:
            state = make_state(engine, args, options, chat_template=chat_template)
            await load_first_adapters(engine, parse_adapters(args.lora_modules, state.model_names))
            # What there is now stays; the collector need not look at it again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(_GC_THRESHOLD)
            return await _serve(
                state,
                listener,
                signals,
                lambda: announce(state, listener.address, time.monotonic() - started),
            )
        finally:
            await engine.shutdown()


async def _serve(
    state: ServerState, listener: Listener, signals: Signals, announce: Callable[[], None]
) -> int:
    listener.listen()
    server = make_uvicorn(create_app(state), state.args)
    died = asyncio.Event()
    state.engine.on_death(died.set)
    serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
    loads = asyncio.create_task(write_load_lines(state))
    try:
        await until_listening(server, serving, listener.address)
        announce()
        notify("READY=1")
        await first_of(serving, signals.first.wait(), died.wait())
        notify("STOPPING=1")
        if died.is_set():
            state.dead = True
            logger.error("the engine is dead; its requests fail, and the server ends")
        else:
            state.draining = True
            await drain(state.active, state.args.drain_timeout, signals)
        state.stop_active()
        await let_end(state.active)
    finally:
        loads.cancel()
        server.should_exit = server.force_exit = True
        await asyncio.gather(serving, loads, return_exceptions=True)
        await state.responses.close()
        await in_daemon_thread(state.traces.close)
    return EXIT_ENGINE_DEAD if died.is_set() else 0
