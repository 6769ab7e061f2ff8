"""Grammars are compiled in threads, each within a time, and kept for the next who asks.

A backend bounds its own work; the time is for what it does not count. A thread that is overdue
cannot be stopped: its job is given up, another thread takes its place, and it ends when it is done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from tokenmill.errors import ConfigError, InvalidRequestError
from tokenmill.structured_output.backend import Grammar, GrammarBackend
from tokenmill.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_THREADS = 2
_MAX_LOST_THREADS = 6
"""Threads that are overdue; with more, nothing is compiled until one of them ends."""
_MAX_GRAMMARS = 128
_STACK_BYTES = 256 << 20
"""Libraries follow references by recursion, as deep as the limits of forms allow. Only what is used
of it takes memory.
"""


class Job(Generic[T]):
    """Work that is waiting, under way, or done."""

    def __init__(self, work: Callable[[GrammarBackend], T]) -> None:
        self._work = work
        self._done = threading.Event()
        self._value: T | None = None
        self._error: InvalidRequestError | None = None
        self.started: float | None = None
        """When the work began; None before."""
        self.is_given_up = False

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Whether it is done within that time."""
        return self._done.wait(seconds)

    def result(self) -> T:
        """What the work returned. Raises `InvalidRequestError` if it failed."""
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value

    def run(self, backend: GrammarBackend) -> None:
        """Do the work, whatever comes of it."""
        try:
            self._value = self._work(backend)
        except InvalidRequestError as error:
            self._error = error
        except Exception as error:  # one request pays for whatever a library raises
            logger.exception("A grammar could not be compiled.")
            self._error = _refusal(f"the grammar could not be compiled: {type(error).__name__}")
        if not self.is_given_up:
            self._done.set()

    def fail(self, error: InvalidRequestError) -> None:
        """End it without a result."""
        self.is_given_up = True
        self._error = error
        self._done.set()


class GrammarCompiler:
    """Threads, and the grammars that they have compiled.

    Args:
        make_backend: called once, by the first who needs it.
        timeout: seconds that one job may take.
    """

    def __init__(
        self,
        make_backend: Callable[[], GrammarBackend],
        *,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_backend = make_backend
        self._timeout = timeout
        self._clock = clock
        self._lock = threading.Lock()
        self._backend_lock = threading.Lock()
        self._backend: GrammarBackend | ConfigError | None = None
        self._jobs: SimpleQueue[Job[object] | None] = SimpleQueue()
        """None ends a thread."""
        self._is_closed = False
        self._num_threads = 0
        self._num_lost = 0
        self._grammars: OrderedDict[tuple[object, ...], Grammar] = OrderedDict()
        self._compiling: dict[tuple[object, ...], threading.Lock] = {}

    def submit(self, work: Callable[[GrammarBackend], T]) -> Job[T]:
        """Have work done by one of the threads."""
        job = Job(work)
        self._jobs.put(job)  # type: ignore[arg-type]
        with self._lock:
            if self._num_threads < _NUM_THREADS:
                self._start_thread()
        return job

    def shutdown(self) -> None:
        """Let the threads end when they are done with what they do; may be called twice."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._num_threads):
                self._jobs.put(None)

    def compile(self, backend: GrammarBackend, params: StructuredOutputsParams) -> Grammar:
        """The grammar of a form; to be called by a job. Who asks for one that is being compiled
        waits for it.
        """
        key = (
            params.kind,
            params.source,
            params.disable_any_whitespace,
            params.whitespace_pattern,
            params.disable_additional_properties,
        )
        with self._lock:
            turn = self._compiling.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                known = self._grammars.get(key)
                if known is not None:
                    self._grammars.move_to_end(key)
                    return known
            grammar = None
            try:
                grammar = backend.compile(params)
            finally:
                with self._lock:  # at once: whoever comes now must find the grammar, or none
                    self._compiling.pop(key, None)
                    if grammar is not None:
                        self._grammars[key] = grammar
                    if len(self._grammars) > _MAX_GRAMMARS:
                        self._grammars.popitem(last=False)
        return grammar

    def give_up_if_overdue(self, job: Job[T]) -> None:
        """End a job that has taken too long."""
        if job.started is None or job.is_done or self._clock() - job.started <= self._timeout:
            return
        job.fail(
            _refusal(
                f"compiling takes longer than {self._timeout:g} s"
                " (structured_outputs_config.compile_timeout); make the form simpler"
            )
        )
        with self._lock:
            self._num_lost += 1
            if self._num_lost <= _MAX_LOST_THREADS:
                self._start_thread()
            else:
                self._num_threads -= 1

    def _start_thread(self) -> None:
        """A thread in addition, or in place of a lost one. The lock is held."""
        if self._num_threads < _NUM_THREADS:
            self._num_threads += 1
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=self._work, name="tokenmill-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            backend = self._ready_backend()
            if isinstance(backend, ConfigError):
                job.fail(_refusal(str(backend)))
                continue
            job.started = self._clock()
            job.run(backend)
            if job.is_given_up:
                with self._lock:
                    self._num_lost -= 1
                    if self._num_threads >= _NUM_THREADS or self._is_closed:
                        return
                    self._num_threads += 1

    def _ready_backend(self) -> GrammarBackend | ConfigError:
        with self._backend_lock:
            if self._backend is None:
                try:
                    self._backend = self._make_backend()
                except ConfigError as error:
                    self._backend = error
                except Exception as error:  # a tokenizer may fail in ways of its own
                    logger.exception("The grammar backend could not be built.")
                    self._backend = ConfigError(f"the grammar backend could not be built: {error}")
            return self._backend


def _refusal(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {why}.", parameter="structured_outputs")
