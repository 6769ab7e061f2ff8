"""One simulated engine: a real scheduler, and steps that take the time of a cost model."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.contracts.request import EngineCoreOutputs
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.core.build import build_scheduler
from tokenmill.errors import InvalidRequestError
from tokenmill.simulate.cost import CostModel
from tokenmill.simulate.cruise import Cruise, can_skip_steps, num_equal_steps, skip_steps
from tokenmill.simulate.recorder import Recorder
from tokenmill.simulate.requests import SAMPLED, SimulatedRequest
from tokenmill.simulate.work import StepWork, WorkCounter

NEVER = math.inf
_FEWEST_SKIPPED, _MOST_SKIPPED = 8, 256
"""Steps that are looked ahead; more, where nothing came between the last time."""
_ONE, _NONE = [SAMPLED], list[int]()

OnPlan = Callable[[SchedulerOutput], None]


@dataclass(slots=True)
class WorkerCounts:
    """What a worker has done."""

    num_steps: int = 0
    num_tokens: int = 0
    """Computed."""
    busy_seconds: float = 0.0
    block_seconds: float = 0.0
    """Blocks in use, summed over time."""
    most_blocks: int = 0
    """In use at the end of a step."""


@dataclass(slots=True)
class _Flight:
    """A step under way."""

    plan: SchedulerOutput
    end: float


class SimulatedWorker:
    """Made for one simulation; its owner calls `advance` at `next_event`, and never out of order.

    Args:
        config: of the engine.
        cache: its pool.
        cost: what steps take.
        recorder: is told all tokens.
        acceptance: how likely a draft holds, where the engine drafts.
        seed: of the drafts.
        skips_steps: whether steps that are alike are made at once; the results are the same.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCacheConfig,
        cost: CostModel,
        recorder: Recorder,
        *,
        acceptance: float = 0.0,
        seed: int = 0,
        skips_steps: bool = True,
    ) -> None:
        self.now = 0.0
        self.scheduler = build_scheduler(config, cache, clock=lambda: self.now)
        self.counts = WorkerCounts()
        self.live: dict[str, SimulatedRequest] = {}
        """Requests that are not finished, by id."""
        self._recorder = recorder
        self.on_plan: OnPlan | None = None
        """Is told the plans; steps are not skipped then."""
        self._cost, self._counter = cost, WorkCounter(cache)
        self._depth = config.scheduler.max_steps_in_flight
        self._policy = config.scheduler.policy
        self._num_drafts = config.num_speculative_tokens
        self._acceptance, self._draw = acceptance, random.Random(f"drafts {seed}")
        self._may_skip = skips_steps and can_skip_steps(cache, self._num_drafts)
        self._num_groups = len(cache.groups)
        self._look_ahead = _FEWEST_SKIPPED
        self._in_flight: deque[_Flight] = deque()
        self._cruise: Cruise | None = None
        self._wakes = NEVER
        """When an idle worker begins."""
        self._work: StepWork | None = None
        """Of the last plan that the scheduler has made."""
        self._is_stuck = False
        """Whether the requests that wait have not fitted, and will not until one ends."""

    # ---- the outside ----------------------------------------------------------------------

    @property
    def next_event(self) -> float:
        """When `advance` is to be called; `NEVER` of an idle worker."""
        if self._cruise is not None:
            return self._cruise.end
        return self._in_flight[0].end if self._in_flight else self._wakes

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    def add(self, request: SimulatedRequest, now: float) -> bool:
        """A request comes; False if the engine refuses it, since it could never be served."""
        try:
            self.scheduler.add_request(request.to_core())
        except InvalidRequestError:
            return False
        self.live[request.request_id] = request
        if self._policy != "fcfs":
            self._is_stuck = False
        if self._cruise is not None:
            if not self._is_held_back():
                self._cruise.stop_at(now)
            if request.deadline is not None:
                self._cruise.stop_at(request.deadline)
        elif not self._in_flight:
            self._wakes = now  # and not at once: more may come at this moment
        return True

    def advance(self) -> list[SimulatedRequest]:
        """Go on to `next_event`; returns the requests that have ended."""
        self._move_to(self.next_event)
        self._wakes = NEVER
        ended = []
        if self._cruise is not None:
            self._land(self._cruise)
        elif self._in_flight:
            flight = self._in_flight.popleft()
            result = self._result_of(flight.plan)
            ended = self._take(self.scheduler.update_from_output(flight.plan, result))
            self.counts.most_blocks = max(self.counts.most_blocks, self._num_used_blocks)
        self._submit()
        if not self._in_flight and self._cruise is None:
            ended += self._take(self.scheduler.take_outputs())
        return ended

    # ---- steps ----------------------------------------------------------------------------

    def _submit(self) -> None:
        """Start as many steps as may be in flight."""
        while len(self._in_flight) < self._depth:
            if self._may_skip and self.on_plan is None and self._begin_cruise():
                return
            num_running = len(self.scheduler.running)
            plan = self.scheduler.schedule()
            self._is_stuck = self._finds_no_room(plan, num_running)
            if not plan.req_ids:
                return
            if self.on_plan is not None:
                self.on_plan(plan)
            self._work = self._work_of(plan)
            self._launch(plan, self._cost.seconds(self._work))

    def _launch(self, plan: SchedulerOutput, seconds: float) -> None:
        begin = self._in_flight[-1].end if self._in_flight else self.now
        self._in_flight.append(_Flight(plan, begin + seconds))
        self.counts.num_steps += 1
        self.counts.num_tokens += plan.total_num_scheduled_tokens
        self.counts.busy_seconds += seconds

    def _work_of(self, plan: SchedulerOutput) -> StepWork:
        if plan.is_repeated and self._work is not None and self._counter.sees_all:
            return self._counter.next_decode(self._work)
        return self._counter.of(plan, self.scheduler.requests)

    def _finds_no_room(self, plan: SchedulerOutput, num_running: int) -> bool:
        """Whether the plan has tried to start the request that waits first, beside `num_running`,
        and blocks were too few, and there is no prompt under way whose blocks it could share soon.
        """
        scheduler = self.scheduler
        config = scheduler.config
        return (
            len(scheduler.waiting) > 0
            and len(scheduler.running) == num_running < config.max_num_seqs
            and plan.total_num_scheduled_tokens < config.max_num_batched_tokens
            and not scheduler.waiting.peek().num_steps_in_flight
            and all(
                each.total_num_scheduled_tokens == len(each.req_ids)
                for each in (plan, *(flight.plan for flight in self._in_flight))
            )
        )

    def _result_of(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """What the workers would tell: a token for each sample, and drafts that hold or do not."""
        if not self._num_drafts:
            sampled = [_ONE if is_sampled else _NONE for is_sampled in plan.is_sampled]
            return ModelRunnerOutput(plan.step_id, plan.req_ids, sampled)
        sampled, drafts = [], {}
        for request_id, is_sampled in zip(plan.req_ids, plan.is_sampled, strict=True):
            num_held = 0
            for _ in plan.draft_token_ids.get(request_id, ()):
                if self._draw.random() >= self._acceptance:
                    break
                num_held += 1
            sampled.append([SAMPLED] * (1 + num_held) if is_sampled else [])
            if is_sampled:
                drafts[request_id] = [SAMPLED] * self._num_drafts
        return ModelRunnerOutput(plan.step_id, plan.req_ids, sampled, draft_token_ids=drafts)

    def _take(self, outputs: EngineCoreOutputs) -> list[SimulatedRequest]:
        """Tell the recorder; returns the requests that have ended."""
        ended = []
        for output in outputs.outputs:
            request = self.live[output.request_id]
            request.scheduled = output.first_scheduled_time
            if output.new_token_ids:
                self._recorder.add(request, len(output.new_token_ids), self.now)
            if output.finish_reason is not None:
                request.finish_reason = output.finish_reason
                request.num_cached = output.num_cached_tokens
                request.num_preemptions = output.num_preemptions
                del self.live[output.request_id]
                ended.append(request)
                self._is_stuck = False
        return ended

    # ---- steps that are alike -------------------------------------------------------------

    def _is_held_back(self) -> bool:
        """Whether no request that waits can start before one that runs has ended."""
        scheduler = self.scheduler
        return self._is_stuck or len(scheduler.running) == scheduler.config.max_num_seqs

    def _begin_cruise(self) -> bool:
        scheduler, num_in_flight = self.scheduler, len(self._in_flight)
        if num_in_flight != self._depth - 1 or (scheduler.waiting and not self._is_held_back()):
            return False
        if len(self.live) != len(scheduler.requests):
            return False  # the next result tells of requests that a deadline has ended
        num_steps = num_equal_steps(scheduler, self._num_groups, num_in_flight, self._look_ahead)
        if num_steps < 1:
            return False
        work = self._counter.of_decode(
            [request.num_computed_tokens + 1 for request in scheduler.running.values()]
        )
        seconds = []
        for _ in range(num_steps):
            seconds.append(self._cost.seconds(work))
            work = self._counter.next_decode(work)
        cruise = Cruise.of(self.now, [flight.end for flight in self._in_flight], seconds)
        cruise.stop_at(scheduler.deadlines.next)
        if cruise.num_steps == 0:
            return False
        self._cruise = cruise
        return True

    def _land(self, cruise: Cruise) -> None:
        """The time of a cruise has passed."""
        self._cruise = None
        is_whole = cruise.num_steps + cruise.num_in_flight == len(cruise.ends)
        self._look_ahead = min(
            2 * self._look_ahead if is_whole else max(2 * cruise.num_steps, _FEWEST_SKIPPED),
            _MOST_SKIPPED,
        )
        if not cruise.num_steps:
            return
        num_blocks = self._num_used_blocks
        skip_steps(self.scheduler, cruise.num_steps)
        for flight, end in zip(self._in_flight, cruise.in_flight, strict=True):
            flight.end = end
        requests = [self.live[request_id] for request_id in self.scheduler.running]
        self._recorder.add_steady(requests, cruise.settled)
        counts, num_new_blocks = self.counts, self._num_used_blocks - num_blocks
        counts.num_steps += cruise.num_steps
        counts.num_tokens += cruise.num_steps * len(requests)
        counts.busy_seconds += cruise.busy_seconds
        counts.block_seconds += num_new_blocks / 2 * (cruise.end - cruise.begin)
        counts.most_blocks = max(counts.most_blocks, self._num_used_blocks)

    @property
    def _num_used_blocks(self) -> int:
        return self.scheduler.kv.pool.num_used_blocks

    def _move_to(self, now: float) -> None:
        self.counts.block_seconds += self._num_used_blocks * (now - self.now)
        self.now = now
