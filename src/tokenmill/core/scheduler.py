"""Which request computes how many tokens in the next step, and what a result means.

There is one rule for prefill and decode: a request has tokens it knows (and expects, and drafts)
and tokens it has computed, and a step computes a part of the difference. Chunked prompts, prefix
hits, speculation and resumption after preemption follow from it.

Several plans may be in flight. Counters move when a plan is made, so that the next one can be made
before its result is back; results settle in the order of the plans.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tokenmill.config.engine_config import SchedulerConfig
from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.contracts.request import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
)
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.contracts.seams import GrammarManager, KVTransfer, NoGrammars
from tokenmill.core.admission import OutputSettled, ReadinessRule, ReadinessRules, acceptance_rules
from tokenmill.core.chunks import ChunkSizes
from tokenmill.core.deadlines import Deadlines
from tokenmill.core.decoding import settle_token, steps_in_place
from tokenmill.core.drafting import Drafting
from tokenmill.core.encoder import NO_ENCODER, EncoderSchedule
from tokenmill.core.grammar import GrammarReady, follow_grammar, start_grammar
from tokenmill.core.kv.manager import KVCacheManager
from tokenmill.core.limits import check_groups, check_limits
from tokenmill.core.micro_batches import next_micro_batch
from tokenmill.core.outputs import error_output, step_output
from tokenmill.core.policy import get_policy
from tokenmill.core.request import Request, RequestStatus
from tokenmill.core.rows import RowAllocator
from tokenmill.core.step import Step
from tokenmill.core.stop import POOLED, append_tokens, describe_fault


class Scheduler:
    """Owns every live request, the rows and the blocks.

    Args:
        config: limits of a step and of a request.
        kv_cache_config: the pool.
        vocab_size: sampled ids must be below; others end their request with an error.
        enable_prefix_caching: share blocks of equal prefixes.
        num_speculative_tokens: most drafts checked per request and step; 0 without a drafter.
        num_lookahead_tokens: slots that a drafter writes behind its tokens.
        readiness_rules: rules of features that hold requests back.
        grammars: follows the requests whose text must have a form.
        encoder: decides when images are encoded; without it there are none.
        kv_transfer: where KV is besides the pool; without it, nowhere.
        clock: seconds, monotonic.
        verify_prefix_hits: debug mode that compares tokens on every prefix hit.

    Raises `ConfigError` for settings that cannot work together.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_config: KVCacheConfig,
        *,
        vocab_size: int,
        enable_prefix_caching: bool,
        num_speculative_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        readiness_rules: Sequence[ReadinessRule] = (),
        grammars: GrammarManager | None = None,
        encoder: EncoderSchedule | None = None,
        kv_transfer: KVTransfer | None = None,
        clock: Callable[[], float] = time.monotonic,
        verify_prefix_hits: bool = False,
    ) -> None:
        check_limits(config)
        check_groups(kv_cache_config.groups, num_speculative_tokens)
        self.config = config
        self.kv = KVCacheManager(
            kv_cache_config,
            max_model_len=config.max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            max_step_tokens=config.max_num_batched_tokens + 2 * num_speculative_tokens,
            verify_hits=verify_prefix_hits,
            transfer=kv_transfer,
        )
        self._num_speculative_tokens = num_speculative_tokens
        self._num_lookahead_tokens = num_lookahead_tokens
        self._vocab_size, self._clock = vocab_size, clock
        self._chunks = ChunkSizes(config, kv_cache_config.groups)
        # The last token of a sequence needs no slot: it is never computed.
        self._max_total_tokens = min(config.max_model_len, self.kv.num_usable_tokens + 1)

        self.encoder = encoder or NO_ENCODER
        rules = acceptance_rules(config.max_model_len, self.kv.num_usable_tokens)
        self._acceptance_rules = (*rules, self.encoder)
        self._grammars = grammars or NoGrammars()
        self._drafting = Drafting(num_speculative_tokens, self._grammars)
        self.readiness = ReadinessRules(
            OutputSettled(), GrammarReady(self._grammars), self.kv.transfers, *readiness_rules
        )
        self._policy = get_policy(config.policy)

        self.requests: dict[str, Request] = {}
        """All live requests by id."""
        self.waiting = self._policy.make_queue()
        self.running: dict[str, Request] = {}
        """By id, in the order of admission."""
        self._rows = RowAllocator(config.max_num_seqs)
        self._freed_rows: list[int] = []
        self.deadlines = Deadlines()
        self._in_flight: deque[Step] = deque()
        self._last = Step(SchedulerOutput(-1), 0, self._chunks, num_repeats=0)
        self._ended_outputs: list[EngineCoreOutput] = []
        self._next_step_id = self._num_preemptions = self._num_errors = 0

    # ---- requests come and go -------------------------------------------------------------

    def add_request(self, data: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it could never be served; the message gives the numbers.
        """
        assert data.request_id not in self.requests, f"request id {data.request_id} is in use"
        for rule in self._acceptance_rules:
            rule.check(data)
        request = Request(data, max_total_tokens=self._max_total_tokens)
        if request.is_structured:
            self._grammars.add(data)
        self.requests[request.request_id] = request
        self.waiting.add(request)
        self.deadlines.add(data)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End these requests, whatever they are doing. Unknown and ended ids are passed over.

        No output is made: whoever aborts knows. What is in flight for them is dropped.
        """
        for request in filter(None, map(self.requests.get, request_ids)):
            self._finish(request, RequestStatus.FINISHED_ABORTED)

    def fail_requests(self, failures: Iterable[tuple[str, str]]) -> None:
        """End requests with an error each. Unknown and ended ids are passed over."""
        for request_id, error in failures:
            if request_id in self.requests:
                self._ended_outputs.append(self._fail(self.requests[request_id], error))

    def has_requests(self) -> bool:
        """Whether a request is alive, has an output that nobody has fetched, or left KV to save."""
        return bool(self.requests or self._ended_outputs) or self.kv.transfers.is_busy

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; False if blocks are in use.

        With `reset_running_requests` all running requests are preempted first, so that it always
        succeeds; they lose no token and start over in their order.
        """
        if reset_running_requests:
            for request in reversed(list(self.running.values())):
                self._preempt(request)
        return self.kv.reset_prefix_cache()

    def make_stats(self) -> SchedulerStats:
        """The state now, and the counters since the start."""
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_preemptions=self._num_preemptions,
            num_errors=self._num_errors,
            **self.kv.counts(),
            **self._drafting.counts(),
            **self.encoder.counts(),
        )

    # ---- planning -------------------------------------------------------------------------

    def plan_anew(self) -> None:
        """Have the next plan made from the requests' counts, which somebody has moved on."""
        self._last.num_repeats = 0

    def schedule(self) -> SchedulerOutput:
        """Plan the next step, and count it as in flight unless it is empty.

        An empty plan must not be sent. Rows that were freed are told in the next plan that is not.
        """
        if self.deadlines:
            self._abort_overdue()
        is_same = self._last.can_repeat(len(self.requests), self.config.max_num_seqs)
        if is_same and not self._freed_rows:
            step = self._last.repeat(self._next_step_id)
        else:
            step = self._plan_step()
        if step.requests:
            self._last = step
            self._in_flight.append(step)
            self._next_step_id += 1
        return step.plan

    def _plan_step(self) -> Step:
        plan, budget = SchedulerOutput(self._next_step_id), self.config.max_num_batched_tokens
        step = Step(plan, budget, self._chunks, self.running, self.encoder)
        self._schedule_running(step)
        if not step.num_preempted and len(self.requests) > len(self.running):
            self._schedule_waiting(step, self._clock())
        if self._num_speculative_tokens or self.config.num_stages > 1:
            step.num_repeats = 0  # its result may bring drafts; in stages, its requests wait for it
        if step.requests:
            plan.finished_rows, self._freed_rows = self._freed_rows, []
            step.launch()
        return step

    def _schedule_running(self, step: Step) -> None:
        """Continue running requests in the order of admission, preempting where blocks lack."""
        requests = next_micro_batch(list(self.running.values()), self.config.num_stages)
        for index, request in enumerate(requests, start=1):
            if not step.token_budget:
                break
            if request.num_output_placeholders and self._drafting.holds(request):
                continue
            if (num_steps := steps_in_place(request, self._num_lookahead_tokens)) > 0:
                step.add_decode(request, num_steps)
            elif request.is_running:  # not preempted for one before it
                self._drafting.leave_room(request, len(requests) - index, step)
                num_pending = request.num_pending_tokens
                num_new_tokens = step.fitting(request, request.num_computed_tokens, num_pending)
                if num_new_tokens:
                    if not self._take_slots(request, num_new_tokens, step):
                        break
                    step.add(request, num_new_tokens)

    def _take_slots(self, request: Request, num_new_tokens: int, step: Step) -> bool:
        """Get slots, preempting others if need be; False if the request itself had to give way."""
        while True:
            new_block_ids = self.kv.allocate_slots(
                request, num_new_tokens, num_lookahead_tokens=self._num_lookahead_tokens
            )
            if new_block_ids is not None:
                step.add_block_ids(request, new_block_ids)
                return True
            victim = self._policy.choose_victim(self.running)
            step.remove(victim)
            step.num_preempted += 1
            self._preempt(victim)
            if victim is request:
                return False

    def _schedule_waiting(self, step: Step, now: float) -> None:
        """Start waiting requests in their order, until one that is ready does not fit."""
        set_aside = []
        self.readiness.begin_pass(self.running)
        while self.waiting and step.token_budget and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            request.wait_reason = self.readiness.wait_reason(request)
            if request.wait_reason is not None:
                set_aside.append(self.waiting.pop())
            elif not self._start(request, step, now):
                break
        for request in reversed(set_aside):
            self.waiting.prepend(request)

    def _start(self, request: Request, step: Step, now: float) -> bool:
        """Admit the first waiting request, if budget and blocks allow; False leaves all as it was.

        Hits are looked up, tokens counted and blocks taken in one go, so that none can go stale.
        """
        start_grammar(request, self._grammars)
        computed = self.kv.get_computed_blocks(request)
        wanted = request.num_tokens - computed.num_tokens
        num_new_tokens = step.fitting(request, computed.num_tokens, wanted)
        may_be_cut = self.config.enable_chunked_prefill or request.embeds_end
        if num_new_tokens < (1 if may_be_cut else wanted):
            return False
        new_block_ids = self.kv.allocate_slots(
            request,
            num_new_tokens,
            computed=computed,
            num_lookahead_tokens=self._num_lookahead_tokens,
            num_must_fit=request.num_tokens + self._num_speculative_tokens,
        )
        if new_block_ids is None:
            return False
        self.waiting.pop()
        self.running[request.request_id] = request
        request.start(self._rows.take(), computed.num_tokens)
        if request.first_scheduled_time is None:
            self.kv.record_admission(request, computed, now)
        step.add_new(request, self.kv.block_ids(request))
        step.add(request, num_new_tokens)
        return True

    # ---- settling -------------------------------------------------------------------------

    def update_from_output(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Settle the oldest plan in flight: append tokens, end requests, cache full blocks."""
        step = self._in_flight.popleft()
        assert step.plan is plan, "plans settle in the order in which they were made"
        assert result.step_id == plan.step_id, "this is another plan's result"
        outputs, tokens, tokens_only = [], result.sampled_token_ids, result.has_tokens_only
        vocab_size, kv, finish = self._vocab_size, self.kv, self._finish
        for index, request in enumerate(step.requests):
            request.num_steps_in_flight -= 1
            output = None
            if tokens_only and step.is_decode[index]:
                output = settle_token(request, tokens[index], vocab_size, kv, finish)
            if output is None and not request.is_finished:
                output = self._settle(step, index, result)
            if output is not None:
                outputs.append(output)
        return self._collect(outputs)

    def take_outputs(self) -> EngineCoreOutputs:
        """Outputs of requests that ended without a result, for when no step is in flight."""
        return self._collect([])

    def _settle(self, step: Step, index: int, result: ModelRunnerOutput) -> EngineCoreOutput | None:
        """Apply one request's part of a result; None if there is nothing to tell."""
        request = step.requests[index]
        request_id = request.request_id
        sampled = result.sampled_token_ids[index]
        num_due = step.num_due(index)
        error = result.errors.get(request_id) or describe_fault(sampled, num_due, self._vocab_size)
        if error is not None:
            return self._fail(request, self._grammars.failure(request_id) or error)
        if request.pending_prompt_logprobs is not None:
            request.pending_prompt_logprobs += result.prompt_logprobs.get(request_id, ())
        token_ids, stop = append_tokens(request, sampled)
        if request.is_structured and token_ids:
            token_ids, stop, error = follow_grammar(request, self._grammars, token_ids, stop)
            if error is not None:
                return self._fail(request, error)
        if request.is_running:  # a preempted one has given its counters and blocks back
            request.settle(step.plan.num_scheduled_tokens[index], num_due, len(sampled))
            self.kv.cache_blocks(request, request.num_settled_tokens)
            self.encoder.settle(request)
            self._drafting.settle(request, num_due, len(sampled))
            if num_due:
                self._drafting.take(request, result)
        if request_id in result.pooled:
            stop = POOLED
        elif not token_ids:
            return None
        if stop is not None:
            self._finish(request, stop.status)
        return step_output(request, token_ids, stop, result)

    def _collect(self, outputs: list[EngineCoreOutput]) -> EngineCoreOutputs:
        if self._ended_outputs:
            outputs, self._ended_outputs = self._ended_outputs + outputs, []
        return EngineCoreOutputs(outputs)

    # ---- ends and preemption --------------------------------------------------------------

    def _fail(self, request: Request, error: str) -> EngineCoreOutput:
        """End one request with an error; the others do not notice."""
        self._num_errors += 1
        self.kv.forget(request)
        self._finish(request, RequestStatus.FINISHED_ERROR)
        return error_output(request, error)

    def _abort_overdue(self) -> None:
        overdue = self.deadlines.pop_overdue(self._clock())
        for request in filter(None, map(self.requests.get, overdue)):
            self._finish(request, RequestStatus.FINISHED_ABORTED)
            self._ended_outputs.append(request.make_output())

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks and row; it waits in front and computes again."""
        self._leave_running(request)
        request.preempt()
        self._num_preemptions += 1
        self.waiting.prepend(request)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """End a live request in any state; the one way out."""
        if request.is_running:
            self._leave_running(request)
        else:
            self.waiting.remove(request)
        request.transition(status)
        self._grammars.remove(request.request_id)
        del self.requests[request.request_id]
        self.kv.request_finished(request, is_last=not self.running)

    def _leave_running(self, request: Request) -> None:
        del self.running[request.request_id]
        self.kv.free(request)
        self.encoder.release(request)
        assert request.row is not None
        self._rows.release(request.row)
        self._freed_rows.append(request.row)
        request.row = None
