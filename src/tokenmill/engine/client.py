"""The front end's face of the engine core, wherever that runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from tokenmill.contracts.operations import EngineState, Operation, Tensors
from tokenmill.contracts.request import (
    AdapterInfo,
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
)
from tokenmill.engine.core import EngineCore


class EngineCoreClient(Protocol):
    """Requests go in, what the steps bring comes out.

    Two implementations: `InProcessClient`, and `ProcessClient` for a core in its own process.
    """

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Queue requests. One that could never be served raises `InvalidRequestError`: here if the
        core is in this process, else out of `get_outputs`.

        Raises `EngineDeadError` if the core has ended.
        """
        ...

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests in any state. Outputs that are on their way may still come."""
        ...

    def get_outputs(self) -> EngineCoreOutputs:
        """What the next step brings: computed now, or waited for. To be called while there are
        requests.

        Raises `EngineDeadError` if the core has ended.
        """
        ...

    def reset_prefix_cache(self) -> Future[bool]:
        """Forget all cached prefixes; the result is False if blocks are in use, then nothing
        changes. Of a core elsewhere it is there after a later `get_outputs`.
        """
        ...

    def load_adapter(self, directory: str) -> Future[AdapterInfo]:
        """Have an adapter read and checked; the result raises `AdapterError` for one that is not
        good. Of a core elsewhere it is there after a later `get_outputs`.
        """
        ...

    def stats(self) -> list[SchedulerStats]:
        """Of each core; of those elsewhere, as of their latest messages."""
        ...

    @property
    def state(self) -> EngineState:
        """What is asleep, and which weights there are."""
        ...

    def operate(self, operation: Operation, tensors: Tensors | None = None) -> Future[EngineState]:
        """Have an operation done, as `CoreOperations.begin` does. The result is there after a later
        `get_outputs`, of whichever core.
        """
        ...

    def shutdown(self) -> None:
        """End the core; may be called twice."""
        ...


class InProcessClient:
    """A core in this process, stepped by whoever asks for its outputs."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        for request in requests:
            self.core.add_request(request)
        self.core.wait_for_grammars([request.request_id for request in requests])

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.core.abort_requests(request_ids)

    def get_outputs(self) -> EngineCoreOutputs:
        return self.core.step()

    def reset_prefix_cache(self) -> Future[bool]:
        done: Future[bool] = Future()
        done.set_result(self.core.scheduler.reset_prefix_cache())
        return done

    def load_adapter(self, directory: str) -> Future[AdapterInfo]:
        return self.core.load_adapter(directory)

    def stats(self) -> list[SchedulerStats]:
        return [self.core.scheduler.make_stats()]

    @property
    def state(self) -> EngineState:
        return self.core.operations.state

    def operate(self, operation: Operation, tensors: Tensors | None = None) -> Future[EngineState]:
        return self.core.operations.begin(operation, tensors)

    def shutdown(self) -> None:
        self.core.shutdown()
