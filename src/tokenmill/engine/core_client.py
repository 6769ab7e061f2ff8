"""The engine core in a process of its own, as its front end sees it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, cast

import zmq

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.encoding import ErrorInfo, LogRecord, rebuild
from tokenmill.contracts.operations import EngineState, Operation
from tokenmill.contracts.request import AdapterInfo, EngineCoreOutputs, EngineCoreRequest
from tokenmill.engine import wire
from tokenmill.engine.placement import ANYWHERE, Placement
from tokenmill.engine.status_page import StatusPage
from tokenmill.errors import EngineDeadError
from tokenmill.executor.lifeline import how_it_ended, start_child

T = TypeVar("T")

DEFAULT_FACTORY = "tokenmill.engine.build:build_core"
_MODULE = "tokenmill.engine.core_process"
_MAX_SOCKET_PATH = 100
"""Bytes that the system takes for the path of a socket, a few less."""
_CONNECT_INTERVAL_MS = 10
"""Between two attempts to reach a core that is being started."""
_WAIT_MS = 500
"""How long to wait for a message before looking whether the core still lives."""


class ProcessClient:
    """One core process, from its start to its end; a core that died is not revived.

    An `EngineCoreClient` whose `get_outputs` waits. An event loop uses `fileno` and `receive`
    instead, and `exit_fd` to be told of the end. To be used by one thread, which must live as long
    as the core: on Linux a child dies with the thread that started it.
    """

    def __init__(
        self,
        args: EngineArgs,
        config: EngineConfig,
        *,
        factory: str = DEFAULT_FACTORY,
        placement: Placement = ANYWHERE,
    ) -> None:
        """Start the process; it builds its core meanwhile, and then sends `Ready`."""
        self.page = StatusPage.create(
            max_steps_in_flight=config.scheduler.max_steps_in_flight,
            max_num_seqs=config.scheduler.max_num_seqs,
        )
        self._directory = _private_directory()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _CONNECT_INTERVAL_MS)
        address = f"ipc://{self._directory}/core"
        # We connect and the core binds: the side that connects keeps what it sends until the other
        # is there, and is not held up when the other has gone.
        self._socket.connect(address)
        self._process = start_child(
            _MODULE,
            address,
            str(self.page.fd),
            str(os.getpid()),
            pass_fds=(self.page.fd,),
            environment=placement.environment,
        )
        self._resets: deque[Future[bool]] = deque()
        self._loading: dict[int, Future[AdapterInfo]] = {}
        """Adapters that the core reads, by the numbers of our questions."""
        self._operations: dict[int, Future[EngineState]] = {}
        """That the core does, by the numbers of our questions, too."""
        self.state = EngineState()
        """As of the core's latest answer."""
        self._numbers = itertools.count()
        self._closed = False
        level = logging.getLogger("tokenmill").getEffectiveLevel()
        self.send(wire.Setup(factory, args, config, level, list(placement.cpus)))
        self.exit_fd = _open_pidfd(self._process.pid)
        """Becomes readable when the process has ended; None where the system has no such thing."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Becomes readable when there may be messages: then `receive` until there are none."""
        return self._socket.fileno()

    # ---- messages ---------------------------------------------------------------------------

    def send(self, message: wire.ToCore) -> None:
        """Send a message; never waits, whether or not anybody takes it. Afterwards there may be
        messages that `fileno` says nothing of, see `has_messages`.

        Raises `InvalidRequestError` for text that cannot be sent, `EngineDeadError` after `close`.
        """
        if self._closed:
            raise EngineDeadError("The engine core has ended.")
        self._socket.send(wire.encode(message), zmq.NOBLOCK)

    @property
    def has_messages(self) -> bool:
        return bool(cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self) -> wire.FromCore | None:
        """The next message that is not about logs, or None if there is none yet."""
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            message = wire.decode_from_core(data)
            match message:
                case LogRecord():
                    message.hand_on()
                case wire.PrefixCacheReset(done):
                    reset = self._resets.popleft()
                    if not reset.cancelled():
                        reset.set_result(done)
                    return message
                case wire.AdapterLoaded(number, info, error):
                    self._answer(self._loading.pop(number), info, error)
                    return message
                case wire.Operated(number, state, error):
                    self.state = state
                    waiting = self._operations.pop(number)
                    self._answer(waiting, None if error is not None else state, error)
                    return message
                case wire.Ready():
                    self._remove_directory()  # the two are connected: nobody else shall be
                    return message
                case _:
                    return message

    # ---- the client interface ---------------------------------------------------------------

    def wait_until_ready(self) -> None:
        """Wait for the core to be built. Raises what building it raised, or `EngineDeadError`."""
        while True:
            match self._wait_for_message():
                case wire.Ready():
                    return
                case wire.StartupFailure(error):
                    raise rebuild(error)

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        self.send(wire.AddRequests([wire.core_request(request) for request in requests]))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        if ids:
            self.send(wire.AbortRequests(ids))

    def get_outputs(self) -> EngineCoreOutputs:
        while True:
            match self._wait_for_message():
                case wire.StepOutputs(outputs):
                    return outputs
                case wire.Refusal(_, error):
                    raise rebuild(error)

    def reset_prefix_cache(self) -> Future[bool]:
        reset: Future[bool] = Future()
        self.send(wire.ResetPrefixCache())
        self._resets.append(reset)
        return reset

    def load_adapter(self, directory: str) -> Future[AdapterInfo]:
        loading: Future[AdapterInfo] = Future()
        number = next(self._numbers)
        self.send(wire.LoadAdapter(number, directory))
        self._loading[number] = loading
        return loading

    def operate(self, operation: Operation) -> Future[EngineState]:
        """As of `EngineCoreClient`, of weights in files."""
        done: Future[EngineState] = Future()
        number = next(self._numbers)
        self.send(wire.Operate(number, operation))
        self._operations[number] = done
        return done

    @staticmethod
    def _answer(waiting: Future[T], result: T | None, error: ErrorInfo | None) -> None:
        if waiting.cancelled():
            return
        if result is not None:
            waiting.set_result(result)
        else:
            assert error is not None
            waiting.set_exception(rebuild(error))

    def ask_to_stop(self) -> None:
        """Ask the core to end; does not wait."""
        if not self._closed:
            self.send(wire.Stop())

    def shutdown(self) -> None:
        """Ask the core to end, wait for a while, and close."""
        self.ask_to_stop()
        if not self._closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_WAIT_MS / 1000)
        self.close()

    def _wait_for_message(self) -> wire.FromCore:
        while (message := self.receive()) is None:
            self.page.beat_front_end()
            was_alive = self.is_alive  # asked first: it may have said something and then ended
            if not self._socket.poll(_WAIT_MS) and not was_alive:
                raise EngineDeadError(f"The engine core {self.how_it_ended()}.")
        return message

    # ---- life and death ---------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, or at least has not ended."""
        return self._process.poll() is None

    def how_it_ended(self) -> str:
        """`was killed by SIGKILL`, `exited with status 1`, or `does not answer`."""
        return how_it_ended(self._process) or "does not answer"

    def kill(self) -> None:
        """End the process, whatever it does; returns before it has ended."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process if it still runs, and free everything; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        unanswered: list[Future[Any]] = [
            *self._resets,
            *self._loading.values(),
            *self._operations.values(),
        ]
        for waiting in (each for each in unanswered if not each.done()):
            waiting.set_exception(EngineDeadError(f"The engine core {self.how_it_ended()}."))
        self._socket.close()
        self._context.term()
        if self.exit_fd is not None:
            os.close(self.exit_fd)
        self.page.close()
        self._remove_directory()

    def _remove_directory(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def _private_directory() -> Path:
    """A new directory that only this user may enter, with a path short enough for a socket."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) + len("/tokenmill-12345678/core") > _MAX_SOCKET_PATH:
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="tokenmill-", dir=parent))


def _open_pidfd(pid: int) -> int | None:
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # an old kernel, or a sandbox that forbids it
        return None
