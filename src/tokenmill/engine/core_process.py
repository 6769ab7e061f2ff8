"""The process in which a server's engine core lives: `python -m tokenmill.engine.core_process`.

Started by `ProcessClient` only. It builds the core that it is told to build and then runs one loop:
take in messages, make a step, send what it brought. The loop sleeps while there is nothing to do.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import zmq

from tokenmill.contracts.encoding import LogRecord, LogSender, describe
from tokenmill.contracts.operations import EngineState
from tokenmill.contracts.request import (
    AdapterInfo,
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
)
from tokenmill.engine import wire
from tokenmill.engine.core import EngineCore
from tokenmill.engine.status_page import StatusPage
from tokenmill.errors import InvalidRequestError
from tokenmill.executor.lifeline import begin_child, leave, start_lifeline

logger = logging.getLogger(__name__)

FRONT_END_TIMEOUT = 10.0
"""Seconds without a sign of life of the front end after which the core pauses: a stopped front end
takes nothing in."""
_PAUSE_POLL_MS = 100
_HELD_BACK_POLL_MS = (1, 50)
"""Shortest and longest wait while requests are there but none may start."""
_ADAPTER_POLL_MS = 5
"""Between two looks at whether an adapter has been read, while there is nothing else to do."""
_HOLDING_POLL_MS = 50
"""Between two looks at whether blocks that are held for another engine have been fetched."""
_PROGRESS_INTERVAL = 0.05
"""Seconds between two messages on how far the model is loaded."""
_LINGER_MS = 1000
"""How long the last messages may take to leave."""


class Channel:
    """The socket to the front end. Used by one thread; others may log."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._logs: deque[LogRecord] = deque(maxlen=10_000)
        self._thread = threading.get_ident()
        self.is_starting = True
        """Messages may be far apart: what its thread logs goes at once."""

    def log(self, record: LogRecord) -> None:
        """Keep a log record, from any thread, until the next message."""
        self._logs.append(record)
        if self.is_starting and threading.get_ident() == self._thread:
            self.flush_logs()

    def flush_logs(self) -> None:
        """Send the log records that are kept."""
        while self._logs:
            self._socket.send(wire.encode(self._logs.popleft()))

    def send(self, message: wire.FromCore) -> None:
        self.flush_logs()
        self._socket.send(wire.encode(message))

    def receive(self, timeout_ms: int | None) -> wire.ToCore | None:
        """The next message; None if none comes in time. Without a limit if that is None."""
        if self._socket.poll(timeout_ms):
            return wire.decode_to_core(self._socket.recv())
        return None


class CoreLoop:
    """Messages in, steps, messages out, until it is told to stop."""

    def __init__(self, core: EngineCore, channel: Channel, page: StatusPage) -> None:
        self._core = core
        self._channel = channel
        self._page = page
        self._stats_sent: SchedulerStats | None = None
        self._held_back_ms = 0
        """Time to wait before the next attempt at a step; grows while nothing may start."""
        self._loading: list[tuple[int, Future[AdapterInfo]]] = []
        """Adapters that are being read, with the numbers of the questions."""
        self._operations: list[tuple[int, Future[EngineState]]] = []
        """Operations that are to be done, likewise."""
        core.journal = page

    def run(self) -> None:
        """Work until the front end says stop."""
        self._send_news(self._core.scheduler.take_outputs())
        self._channel.send(wire.Ready())
        while self._take_in():
            if self._core.has_requests() and not self._is_paused():
                self._step()
            self._channel.flush_logs()

    def _take_in(self) -> bool:
        """Handle every message that is there; wait for one while there is nothing to do.

        False is the end.
        """
        self._page.turn()
        self._send_refusals()
        self._send_adapters()
        self._send_operated()
        message = self._channel.receive(self._patience_ms())
        while message is not None:
            if isinstance(message, wire.Stop):
                return False
            self._handle(message)
            message = self._channel.receive(0)
        self._page.prepare(self._core.requests_in_preparation())
        if not self._core.has_requests():
            # An abort, say, has changed the state without a step.
            self._send_news(self._core.scheduler.take_outputs())
        return True

    def _patience_ms(self) -> int | None:
        if not self._core.has_requests():
            idle = _HOLDING_POLL_MS if self._core.holds_blocks else None
            return _ADAPTER_POLL_MS if self._loading else idle
        return _PAUSE_POLL_MS if self._is_paused() else self._held_back_ms

    def _is_paused(self) -> bool:
        return self._page.front_end_silence() > FRONT_END_TIMEOUT

    def _handle(self, message: wire.ToCore) -> None:
        match message:
            case wire.AddRequests(requests):
                for request in requests:
                    self._add(request)
                self._page.end_intake()
                self._held_back_ms = 0
            case wire.AbortRequests(request_ids):
                self._core.abort_requests(request_ids)
            case wire.ResetPrefixCache():
                done = self._core.scheduler.reset_prefix_cache()
                self._channel.send(wire.PrefixCacheReset(done))
            case wire.LoadAdapter(number, directory):
                self._loading.append((number, self._core.load_adapter(directory)))
            case wire.Operate(number, operation):
                self._operations.append((number, self._core.operations.begin(operation)))
                self._held_back_ms = 0
            case _:
                raise AssertionError(f"{type(message).__name__} comes at another time")

    def _add(self, request: EngineCoreRequest) -> None:
        self._page.begin_intake(request.request_id)
        try:
            self._core.add_request(request)
        except InvalidRequestError as error:
            self._channel.send(wire.Refusal(request.request_id, describe(error)))

    def _send_refusals(self) -> None:
        """Tell of requests that were queued and then found to be wrong."""
        for request_id, error in self._core.take_refusals():
            self._channel.send(wire.Refusal(request_id, describe(error)))

    def _send_adapters(self) -> None:
        """Answer for the adapters that have been read by now."""
        for number, loading in [each for each in self._loading if each[1].done()]:
            self._loading.remove((number, loading))
            error = loading.exception()
            info = None if error is not None else loading.result()
            described = None if error is None else describe(error)
            self._channel.send(wire.AdapterLoaded(number, info, described))

    def _send_operated(self) -> None:
        """Answer for the operations that are done by now."""
        for number, done in [each for each in self._operations if each[1].done()]:
            self._operations.remove((number, done))
            error = done.exception()
            described = None if error is None else describe(error)
            self._channel.send(wire.Operated(number, self._core.operations.state, described))

    def _step(self) -> None:
        num_settled = self._core.num_settled_steps
        self._send_news(self._core.step())
        if self._core.num_settled_steps > num_settled or self._core.waits_for_kv:
            self._held_back_ms = 0
        else:  # requests are there, but none may run yet: asking at once would find the same
            shortest, longest = _HELD_BACK_POLL_MS
            self._held_back_ms = min(max(2 * self._held_back_ms, shortest), longest)

    def _send_news(self, outputs: EngineCoreOutputs) -> None:
        stats = self._core.scheduler.make_stats()
        if outputs.outputs or stats != self._stats_sent:
            outputs.stats = self._stats_sent = stats
            self._channel.send(wire.StepOutputs(outputs))


def build(setup: wire.Setup, channel: Channel) -> EngineCore:
    """Make the core by the factory that the setup names."""
    module, _, name = setup.factory.partition(":")
    factory: Callable[..., EngineCore] = getattr(importlib.import_module(module), name)
    last_sent = 0.0

    def on_progress(stage: str, done: int, total: int) -> None:
        nonlocal last_sent
        now = time.monotonic()
        if done >= total or now - last_sent > _PROGRESS_INTERVAL:
            last_sent = now
            channel.send(wire.LoadProgress(stage, done, total))

    return factory(setup.args, setup.config, on_progress)


def serve(channel: Channel, page: StatusPage) -> int:
    """Build the core and run its loop; the process's exit status."""
    setup = channel.receive(None)
    assert isinstance(setup, wire.Setup), "the setup comes first"
    if setup.cpus:  # before there are threads that compute
        os.sched_setaffinity(0, setup.cpus)
    package_logger = logging.getLogger("tokenmill")
    package_logger.setLevel(setup.log_level)
    package_logger.addHandler(LogSender(channel.log))
    try:
        core = build(setup, channel)
    except Exception as error:  # the process boundary: the front end raises it again
        logger.debug("The engine core could not be built.", exc_info=True)
        channel.send(wire.StartupFailure(describe(error)))
        return 1
    channel.is_starting = False
    try:
        CoreLoop(core, channel, page).run()
    except Exception:  # the process boundary: the front end starts another core
        logger.exception("The engine core failed.")
        channel.flush_logs()
        return 1
    core.shutdown()
    return 0


def main(address: str, page_fd: int, parent_pid: int) -> None:
    """Run the core of the front end that connects to `address`, until either ends."""
    begin_child()
    os.set_inheritable(page_fd, False)
    page = StatusPage(page_fd)
    start_lifeline(parent_pid, beat=page.beat_core)
    context = zmq.Context(io_threads=1)
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.bind(address)
    status = serve(Channel(socket), page)
    socket.close()
    context.term()
    leave(status)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
