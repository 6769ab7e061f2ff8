"""The worker in this process: in the caller's thread, or in one of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, NoReturn, ParamSpec, Protocol, TypeVar

from tokenmill.contracts.plan import GrammarOutput, SchedulerOutput
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.contracts.seams import StepFuture
from tokenmill.errors import EngineDeadError
from tokenmill.worker.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Task(Protocol[T_co]):
    """A call that was submitted."""

    def result(self) -> T_co:
        """Wait for it; returns or raises what it does."""
        ...


class Tasks(Protocol):
    """Runs calls in their order."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Task[T]: ...

    def shutdown(self) -> None: ...


class InlineTasks:
    """Runs each call before `submit` returns; the library's futures cost more than small steps."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Task[T]:
        try:
            return _Returned(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised again by `result()`
            return _Raised(error)

    def shutdown(self) -> None:
        """Nothing is under way."""


@dataclass(frozen=True, slots=True)
class _Returned(Generic[T]):
    value: T

    def result(self) -> T:
        return self.value


@dataclass(frozen=True, slots=True)
class _Raised:
    error: Exception

    def result(self) -> NoReturn:
        raise self.error


class SubmittedStep:
    """A step whose calls are under way."""

    def __init__(self, sampling: Task[StepFuture]) -> None:
        self._sampling = sampling

    def result(self) -> ModelRunnerOutput:
        """Wait for the calls, then for the device."""
        return self._sampling.result().result()


class LocalExecutor:
    """One worker, one device.

    With `background`, steps run in one thread, in the order of the calls, while the caller plans
    the next. Otherwise a call returns when its work is done, or handed to a GPU.
    """

    def __init__(self, worker: Worker, *, background: bool) -> None:
        self._worker: Worker | None = worker
        self._tasks: Tasks = (
            ThreadPoolExecutor(1, thread_name_prefix="tokenmill-worker")
            if background
            else InlineTasks()
        )
        self._forward: Task[None]

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Start the forward pass of a plan; what it raises is raised by the step's `result()`."""
        self._forward = self._tasks.submit(self._running_worker().execute_model, plan)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture:
        """Sample after the forward pass that was started last."""
        worker, forward = self._running_worker(), self._forward

        def sample() -> StepFuture:
            forward.result()
            return worker.sample_tokens(grammar_output)

        return SubmittedStep(self._tasks.submit(sample))

    def shutdown(self) -> None:
        """Finish the steps under way and free the model and its cache; may be called twice."""
        self._tasks.shutdown()
        self._worker = None

    def _running_worker(self) -> Worker:
        if self._worker is None:
            raise EngineDeadError("The engine was shut down; build a new one.")
        return self._worker
