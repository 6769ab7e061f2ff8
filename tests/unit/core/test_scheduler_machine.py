"""Random arrivals, aborts, failures and tiny pools against a device that checks every slot.

Each request's output must be what it brings alone, whatever else happens. `check_invariants` holds
after every step, and nothing is left when all have ended.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers.core import (
    Collector,
    check_idle,
    check_invariants,
    create_executor,
    create_request,
    create_scheduler,
)
from helpers.fake_executor import generate_alone
from helpers.images import Image, prompt_of
from tokenmill.contracts.request import AdapterRef, FinishReason
from tokenmill.core.encoder import EncoderSchedule

PREFIXES = [[], [10, 11, 12, 13], [10, 11, 12, 13, 14, 15, 16, 17, 18], [10, 11, 12, 13, 20, 21]]
IMAGES = [
    Image("cat", 3),
    Image("dog", 3),
    Image("rows", 7, ((0, 2), (3, 2))),
    Image("marked", 4, ((1, 2),)),
    Image("large", 7),
    Image("dot", 1),
]
ADAPTERS = [None, None, AdapterRef("x", "load-1")]


class SchedulerMachine(RuleBasedStateMachine):
    """Submits and settles in any order that `max_depth` allows."""

    max_depth = 1
    encoder = None
    num_drafts = 0
    num_lookahead: int | None = None

    @initialize(
        num_blocks=st.integers(7, 14),
        budget=st.sampled_from([3, 7, 32]),
        threshold=st.sampled_from([0, 5]),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.sampled_from([True, True, False]),
        windows=st.sampled_from([[None], [None], [None, None], [6], [None, 5], [9, None, 1]]),
        chunks=st.sampled_from([(0.0, 0), (0.5, 0), (0.5, 4), (2.0, 30)]),
    )
    def build(self, num_blocks, budget, threshold, policy, caching, windows, chunks):
        self.scheduler = create_scheduler(
            num_blocks=1 + (num_blocks - 1) * len(windows),
            windows=windows,
            max_num_seqs=4,
            max_model_len=40,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            attention_cost=chunks[0],
            shared_tokens=chunks[1],
            policy=policy,
            enable_prefix_caching=caching,
            max_steps_in_flight=self.max_depth,
            num_speculative_tokens=self.num_drafts,
            num_lookahead_tokens=self.num_lookahead,
            encoder=self.encoder,
        )
        self.executor = create_executor(
            self.scheduler, num_drafts=self.num_drafts, num_lookahead=self.num_lookahead
        )
        self.in_flight = []
        self.collector = Collector()
        self.sent = {}
        self.aborted = set()
        self.failing = set()

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(3, 4), min_size=1, max_size=7),
        max_tokens=st.integers(1, 24),
        min_tokens=st.sampled_from([0, 0, 3]),
        stop_token_ids=st.sampled_from([[], [3 + 7 * number for number in range(40)]]),
        initial=st.sampled_from([[], [], [30], [31, 32]]),
        priority=st.integers(0, 2),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        salt=st.sampled_from([None, None, "tenant"]),
        adapter=st.sampled_from(ADAPTERS),
    )
    def arrive(self, prefix, tail, max_tokens, initial, adapter, salt, **kwargs):
        request = create_request(
            prefix + tail,
            max_tokens=max(max_tokens, len(initial) + 1, kwargs["min_tokens"]),
            initial_output_ids=initial,
            cache_salt=salt,
            adapter=adapter,
            **kwargs,
        )
        self.scheduler.add_request(request)
        self.sent[request.request_id] = request

    @rule()
    def submit(self):
        if len(self.in_flight) < self.max_depth:
            running = dict(self.scheduler.running)
            plan = self.scheduler.schedule()
            self._check_preemptions(running)
            if plan.req_ids:
                assert plan.total_num_scheduled_tokens <= (
                    self.scheduler.config.max_num_batched_tokens
                )
                self._check_plan(plan)
                self.executor.execute_model(plan)
                self.in_flight.append((plan, self.executor.sample_tokens(None)))

    @precondition(lambda self: self.in_flight)
    @rule()
    def settle(self):
        plan, future = self.in_flight.pop(0)
        self.collector.add(self.scheduler.update_from_output(plan, future.result()).outputs)

    @rule(turns=st.integers(1, 12))
    def run(self, turns):
        for _ in range(turns):
            self.submit()
            if len(self.in_flight) == self.max_depth:
                self.settle()

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        self.scheduler.abort_requests([request_id])
        self.aborted.add(request_id)

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data(), bad=st.booleans())
    def fail(self, data, bad):
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.running)))
        self.failing.add(request_id)
        if bad:
            self.executor.bad_tokens[request_id] = -5
        else:
            self.executor.errors[request_id] = "injected"

    @rule(running=st.booleans())
    def reset(self, running):
        idle = not self.scheduler.running
        done = self.scheduler.reset_prefix_cache(reset_running_requests=running)
        assert done == (idle or running)

    @invariant()
    def consistent(self):
        check_invariants(self.scheduler)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(200 * (1 + len(self.sent))):
            if not self.in_flight and not self.scheduler.has_requests():
                break
            self.submit()
            if self.in_flight:
                self.settle()
            check_invariants(self.scheduler)
        check_idle(self.scheduler)
        for request_id, request in self.sent.items():
            self._check_outcome(request_id, request)

    def _check_plan(self, plan):
        """More than all plans have in common."""

    def _check_preemptions(self, before):
        """Nobody gives way while one that ranks behind it runs."""
        running = list(self.scheduler.running.values())
        for request in before.values():
            if request.is_running or request.is_finished:
                continue
            if self.scheduler.config.policy == "priority":
                assert all(other.sort_key < request.sort_key for other in running)
            else:
                order = list(before)
                position = order.index(request.request_id)
                assert all(order.index(other.request_id) < position for other in running)

    def _check_outcome(self, request_id, request):
        expected = generate_alone(request, self.scheduler)
        collected = self.collector.requests.get(request_id)
        if collected is None:
            assert request_id in self.aborted
            return
        length = len(collected.token_ids)
        assert collected.token_ids == expected.token_ids[:length]
        last = collected.last
        if last.finish_reason in (None, FinishReason.ERROR):
            assert request_id in (self.aborted if last.finish_reason is None else self.failing)
        else:
            assert length == len(expected.token_ids)
            assert last.finish_reason == expected.finish_reason
            assert last.stop_reason == expected.stop_reason
        if length:
            assert collected.prompt_logprobs == expected.prompt_logprobs


class ImagesMachine(SchedulerMachine):
    """Prompts of text and images; the encoder's budget and cache are tight, and so is the pool."""

    @initialize(
        limits=st.tuples(st.sampled_from([1, 5, 9, 100]), st.sampled_from([7, 9, 12, 30])),
        num_blocks=st.integers(7, 14),
        budget=st.sampled_from([3, 7, 32]),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.sampled_from([True, True, False]),
        windows=st.sampled_from([[None], [None, 5]]),
        whole=st.booleans(),
    )
    def build(self, limits, num_blocks, budget, policy, caching, windows, whole):
        self.encoder = EncoderSchedule(*limits, is_bidirectional=whole)
        self.whole = whole
        if whole:
            budget = 7 + 3 * (1 + self.num_drafts)  # the largest run, beside three that decode
        super().build(num_blocks, budget, 0, policy, caching, windows, (0.0, 0))

    @rule(
        pieces=st.lists(
            st.one_of(st.integers(10, 12), st.sampled_from(IMAGES)), min_size=1, max_size=7
        ),
        max_tokens=st.integers(1, 12),
        initial=st.sampled_from([[], [], [31, 32]]),
        priority=st.integers(0, 2),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def arrive(self, pieces, **kwargs):
        token_ids, features = prompt_of(pieces)
        if len(token_ids) > 20:
            return
        kwargs["max_tokens"] += len(kwargs["initial"])
        super().arrive(
            token_ids, [], min_tokens=0, stop_token_ids=[], adapter=None, salt=None,
            mm_features=features, **kwargs,
        )  # fmt: skip

    def _check_plan(self, plan):
        """Runs that are seen whole are not cut."""
        for request_id in plan.req_ids if self.whole else ():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens
            runs = [run for feature in request.data.mm_features for run in feature.runs]
            assert not any(begin < end < run_end for begin, run_end in runs)


class DraftingMachine(SchedulerMachine):
    num_drafts = 3


class LookupMachine(SchedulerMachine):
    num_drafts = 4
    num_lookahead = 0


class TwoInFlightMachine(SchedulerMachine):
    max_depth = 2


class TwoInFlightDraftingMachine(SchedulerMachine):
    max_depth = 2
    num_drafts = 2


class TwoInFlightImagesMachine(ImagesMachine):
    max_depth = 2
    num_drafts = 2


class TwoInFlightLookupMachine(SchedulerMachine):
    max_depth = 2
    num_drafts = 4
    num_lookahead = 0


_settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestOneInFlight = SchedulerMachine.TestCase
TestDrafts = DraftingMachine.TestCase
TestTwoInFlight = TwoInFlightMachine.TestCase
TestTwoInFlightDrafts = TwoInFlightDraftingMachine.TestCase
TestLookup = LookupMachine.TestCase
TestTwoInFlightLookup = TwoInFlightLookupMachine.TestCase
TestImages = ImagesMachine.TestCase
TestTwoInFlightImages = TwoInFlightImagesMachine.TestCase
for _case in (
    TestOneInFlight,
    TestDrafts,
    TestTwoInFlight,
    TestTwoInFlightDrafts,
    TestLookup,
    TestTwoInFlightLookup,
    TestImages,
    TestTwoInFlightImages,
):
    _case.settings = _settings
del _case  # or it would be collected as a test


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("max_depth", [1, 2])
@pytest.mark.parametrize("num_requests", [64, 600])
@pytest.mark.parametrize("windows", [[None], [7, None, 4]])
def test_b074_b083_a_crowd_in_a_tiny_pool(num_requests, max_depth, num_drafts, windows):
    """Shared prefixes, aborts in every state, failures, many preemptions: 5,312 requests in all."""
    rnd = random.Random(num_requests)
    machine = SchedulerMachine()
    machine.max_depth, machine.num_drafts = max_depth, num_drafts
    machine.build(
        num_blocks=10 if windows == [None] else 8,
        budget=16,
        threshold=0,
        policy=rnd.choice(["fcfs", "priority"]),
        caching=True,
        windows=windows,
        chunks=rnd.choice([(0.0, 0), (2.0, 30)]),
    )
    for _ in range(num_requests):
        machine.arrive(
            prefix=rnd.choice(PREFIXES),
            tail=[rnd.randrange(3, 6) for _ in range(rnd.randrange(1, 8))],
            max_tokens=rnd.randrange(1, 20),
            min_tokens=0,
            stop_token_ids=[],
            initial=[],
            priority=rnd.randrange(3),
            prompt_logprobs=rnd.choice([None, None, 0]),
            salt=None,
            adapter=rnd.choice(ADAPTERS),
        )
        for _ in range(rnd.randrange(4)):
            machine.submit()
            if machine.in_flight and (len(machine.in_flight) == max_depth or rnd.random() < 0.5):
                machine.settle()
        if rnd.random() < 0.15 and machine.scheduler.requests:
            request_id = rnd.choice(sorted(machine.scheduler.requests))
            machine.scheduler.abort_requests([request_id])
            machine.aborted.add(request_id)
        if rnd.random() < 0.05 and machine.scheduler.running:
            request_id = rnd.choice(sorted(machine.scheduler.running))
            machine.executor.errors[request_id] = "injected"
            machine.failing.add(request_id)
    machine.teardown()
    stats = machine.scheduler.make_stats()
    assert stats.num_preemptions > num_requests // 12
    assert stats.prefix_cache_hits > num_requests // (2 if windows == [None] else 4)
    assert len(machine.collector.requests) > num_requests // 2
