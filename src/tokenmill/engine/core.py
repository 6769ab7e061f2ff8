"""The one loop: schedule, submit, sample, settle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Protocol

from tokenmill.contracts.operations import ModelMemory
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.contracts.request import AdapterInfo, EngineCoreOutputs, EngineCoreRequest
from tokenmill.contracts.seams import Executor, GrammarManager, NoGrammars, StepFuture
from tokenmill.core.scheduler import Scheduler
from tokenmill.engine.operations import CoreOperations
from tokenmill.errors import EngineDeadError, InvalidRequestError


class StepJournal(Protocol):
    """Is told which steps are under way, so that it is known what a crash interrupted."""

    def begin(self, plan: SchedulerOutput) -> None:
        """A step is about to be submitted."""
        ...

    def end(self, plan: SchedulerOutput) -> None:
        """The step has settled."""
        ...


class NoJournal:
    """Nobody wants to know."""

    def begin(self, plan: SchedulerOutput) -> None:
        """Forget it."""

    def end(self, plan: SchedulerOutput) -> None:
        """Forget it."""


class EngineCore:
    """Drives a scheduler and an executor, with up to `max_steps_in_flight` steps under way.

    At depth 1 a step is planned when the one before has settled. At depth 2 the next one is planned
    and submitted while one runs; tokens are the same. Call it from one thread only.

    The masks of a step's grammars are filled while its forward pass runs. At depth 2 they depend on
    the tokens of the step before: then only sampling waits for those, not the forward pass.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        max_steps_in_flight: int,
        grammars: GrammarManager | None = None,
        memory: ModelMemory | None = None,
    ) -> None:
        """`memory` is the model's, where it can be given back."""
        self.scheduler = scheduler
        self.operations = CoreOperations(scheduler, memory)
        self._executor = executor
        self._max_steps_in_flight = max_steps_in_flight
        self._grammars = grammars or NoGrammars()
        self._transfers = scheduler.kv.transfers
        self._events = scheduler.kv.events
        self.journal: StepJournal = NoJournal()
        """Set by whoever wants to know what a crash interrupted, before the first step."""
        self.num_settled_steps = 0
        self._in_flight: deque[tuple[SchedulerOutput, StepFuture]] = deque()
        self._unsampled: SchedulerOutput | None = None
        """A plan whose forward pass was started, and whose masks wait for the step before."""
        self._refusals: list[tuple[str, InvalidRequestError]] = []
        self._closed = False

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it could never be served.
            EngineDeadError: the engine was shut down.
        """
        self._check_alive()
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests in any state; their steps in flight settle without them."""
        self.scheduler.abort_requests(request_ids)

    def load_adapter(self, directory: str) -> Future[AdapterInfo]:
        """Have an adapter read and checked, beside the steps; the result may raise `AdapterError`.

        Raises `EngineDeadError` if the engine was shut down.
        """
        self._check_alive()
        return self._executor.load_adapter(directory)

    def has_requests(self) -> bool:
        """Whether another `step` is needed."""
        return bool(self._in_flight or self.scheduler.has_requests() or self.operations.is_busy)

    @property
    def waits_for_kv(self) -> bool:
        """Whether a `step` without tokens waits for KV by itself, for a moment."""
        return self._transfers.is_busy

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks wait for another engine; a `step` sees what has become of them."""
        return self._transfers.holds_blocks

    def requests_in_preparation(self) -> list[str]:
        """Requests whose grammar is being compiled: what breaks meanwhile may be their doing."""
        return self._grammars.compiling()

    def take_refusals(self) -> list[tuple[str, InvalidRequestError]]:
        """Requests that were queued and then found to be wrong: their grammar cannot be had. They
        are out of the engine, and each is told once.
        """
        self._refuse(self._grammars.take_failures())
        refusals, self._refusals = self._refusals, []
        return refusals

    def wait_for_grammars(self, request_ids: Iterable[str]) -> None:
        """Wait until it is known whether these requests' grammars can be had.

        Raises `InvalidRequestError` for the first that cannot; all of them are out of the engine
        then.
        """
        ids = list(request_ids)
        for request_id in ids:
            self._grammars.wait(request_id)
        refusals = self.take_refusals()
        self._refusals = [each for each in refusals if each[0] not in ids]
        for request_id, error in refusals:
            if request_id in ids:
                self.abort_requests(ids)
                raise error

    def step(self) -> EngineCoreOutputs:
        """Submit as many steps as may be in flight, then wait for the oldest and settle it.

        Without a step in flight, operations are done that were waiting for that.
        """
        if self._closed:
            self._check_alive()
        failures = self._grammars.take_failures()
        if failures:
            self._refuse(failures)
        while len(self._in_flight) < self._max_steps_in_flight and self._submit():
            pass
        if not self._in_flight:
            self.operations.advance()
            self._transfers.wait()
            self._settle_transfers()
            return self.scheduler.take_outputs()
        plan, future = self._in_flight.popleft()
        outputs = self.scheduler.update_from_output(plan, future.result())
        self.num_settled_steps += 1
        self._transfers.step_settled()
        self._settle_transfers()
        self.journal.end(plan)
        if self._unsampled is not None:
            self._sample_masked(self._unsampled)
        return outputs

    def shutdown(self) -> None:
        """Stop the executor; may be called twice."""
        self._closed = True
        self._transfers.shutdown()
        self._events.shutdown()
        self._executor.shutdown()
        self._grammars.shutdown()

    def _refuse(self, failures: list[tuple[str, InvalidRequestError]]) -> None:
        """Take requests out whose grammar cannot be had."""
        self.scheduler.abort_requests(request_id for request_id, _ in failures)
        self._refusals += failures

    def _settle_transfers(self) -> None:
        """Begin what the blocks of the last step allow, end requests whose KV did not come, and
        tell what has become of cached blocks.
        """
        self._transfers.poll()
        if failures := self._transfers.take_failures():
            self.scheduler.fail_requests(failures)
        self._events.flush()

    def _submit(self) -> bool:
        """Plan a step and start it; False if there is nothing to compute.

        A step without tokens is not sent: freed rows are told with the next one.
        """
        if self._unsampled is not None or self.operations.holds_steps:
            return False
        plan = self.scheduler.schedule()
        self._transfers.poll()
        if not plan.req_ids:
            return False
        self._transfers.step_submitted()
        self.journal.begin(plan)
        if plan.structured_req_ids:
            return self._submit_masked(plan)
        self._executor.execute_model(plan)
        self._in_flight.append((plan, self._executor.sample_tokens(None)))
        return True

    def _submit_masked(self, plan: SchedulerOutput) -> bool:
        """Start a step with masks; False if these wait for the step before."""
        if self._in_flight:
            self._executor.execute_model(plan)
            self._unsampled = plan
            return False
        self._grammars.begin(plan)
        self._executor.execute_model(plan)
        self._sample_masked(plan)
        return True

    def _sample_masked(self, plan: SchedulerOutput) -> None:
        """Finish the step whose forward pass was started last."""
        self._unsampled = None
        masks = self._grammars.get_grammar_bitmask(plan)
        self._in_flight.append((plan, self._executor.sample_tokens(masks)))

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine was shut down; build a new one.")
