"""The worker in this process: in the caller's thread, or in one of its own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

from tokenmill.contracts.plan import GrammarOutput, SchedulerOutput
from tokenmill.contracts.request import AdapterInfo
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.contracts.seams import StepFuture
from tokenmill.errors import EngineDeadError
from tokenmill.worker.worker import Worker


class LocalExecutor:
    """Of one worker, on one device: what does not depend on where its steps run. What their calls
    raise is raised by a step's `result()`.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker: Worker | None = worker
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="tokenmill-adapters")

    def load_adapter(self, directory: str) -> Future[AdapterInfo]:
        """Read an adapter in a thread of its own."""
        return self._reading.submit(self._running_worker().load_adapter, directory)

    def shutdown(self) -> None:
        """Finish the steps under way and free the model and its cache; may be called twice."""
        self._reading.shutdown(cancel_futures=True)
        self._worker = None

    def _running_worker(self) -> Worker:
        if self._worker is None:
            raise EngineDeadError("The engine was shut down; build a new one.")
        return self._worker


class InlineExecutor(LocalExecutor):
    """A call returns when its work is done, or handed to a GPU: the library's futures would cost
    more than small steps.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._error: Exception | None = None
        """Of the forward pass that was started last."""

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._error = None
        worker = self._worker or self._running_worker()
        try:
            worker.execute_model(plan)
        except Exception as error:  # noqa: BLE001 - raised again by `result()`
            self._error = error

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture:
        if self._error is not None:
            return FailedStep(self._error)
        worker = self._worker or self._running_worker()
        try:
            return worker.sample_tokens(grammar_output)
        except Exception as error:  # noqa: BLE001 - raised again by `result()`
            return FailedStep(error)


class BackgroundExecutor(LocalExecutor):
    """Steps run in one thread, in the order of the calls, while the caller plans the next."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenmill-worker")
        self._forward: Future[None]

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._forward = self._thread.submit(self._running_worker().execute_model, plan)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture:
        worker, forward = self._running_worker(), self._forward

        def sample() -> StepFuture:
            forward.result()
            return worker.sample_tokens(grammar_output)

        return SubmittedStep(self._thread.submit(sample))

    def shutdown(self) -> None:
        self._thread.shutdown()
        super().shutdown()


class SubmittedStep:
    """A step whose calls are under way."""

    def __init__(self, sampling: Future[StepFuture]) -> None:
        self._sampling = sampling

    def result(self) -> ModelRunnerOutput:
        """Wait for the calls, then for the device."""
        return self._sampling.result().result()


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step with a call that raised."""

    error: Exception

    def result(self) -> NoReturn:
        """Raise it."""
        raise self.error


def local_executor(worker: Worker, *, background: bool) -> InlineExecutor | BackgroundExecutor:
    """One whose steps run in a thread of their own, or in the caller's."""
    return BackgroundExecutor(worker) if background else InlineExecutor(worker)
