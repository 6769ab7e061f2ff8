"""The one loop: schedule, submit, sample, settle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from tokenmill.contracts.plan import GrammarOutput, SchedulerOutput
from tokenmill.contracts.request import EngineCoreOutputs, EngineCoreRequest
from tokenmill.contracts.seams import Executor, StepFuture
from tokenmill.core.scheduler import Scheduler
from tokenmill.errors import EngineDeadError


class GrammarManager(Protocol):
    """Makes the masks of a step while its forward pass runs."""

    def get_grammar_bitmask(self, plan: SchedulerOutput) -> GrammarOutput | None:
        """Masks for the plan's structured requests; None if there are none."""
        ...


class NoGrammars:
    """No request is restricted by a grammar."""

    def get_grammar_bitmask(self, plan: SchedulerOutput) -> None:
        return None


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
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        max_steps_in_flight: int,
        grammars: GrammarManager | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._max_steps_in_flight = max_steps_in_flight
        self._grammars = grammars or NoGrammars()
        self.journal: StepJournal = NoJournal()
        """Set by whoever wants to know what a crash interrupted, before the first step."""
        self.num_settled_steps = 0
        self._in_flight: deque[tuple[SchedulerOutput, StepFuture]] = deque()
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

    def has_requests(self) -> bool:
        """Whether another `step` is needed."""
        return bool(self._in_flight) or self.scheduler.has_requests()

    def step(self) -> EngineCoreOutputs:
        """Submit as many steps as may be in flight, then wait for the oldest and settle it."""
        self._check_alive()
        while len(self._in_flight) < self._max_steps_in_flight and self._submit():
            pass
        if not self._in_flight:
            return self.scheduler.take_outputs()
        plan, future = self._in_flight.popleft()
        outputs = self.scheduler.update_from_output(plan, future.result())
        self.num_settled_steps += 1
        self.journal.end(plan)
        return outputs

    def shutdown(self) -> None:
        """Stop the executor; may be called twice."""
        self._closed = True
        self._executor.shutdown()

    def _submit(self) -> bool:
        """Plan a step and start it; False if there is nothing to compute.

        A step without tokens is not sent: freed rows are told with the next one.
        """
        plan = self.scheduler.schedule()
        if not plan.req_ids:
            return False
        self.journal.begin(plan)
        self._executor.execute_model(plan)
        grammar_output = self._grammars.get_grammar_bitmask(plan)
        self._in_flight.append((plan, self._executor.sample_tokens(grammar_output)))
        return True

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine was shut down; build a new one.")
