"""Two plans in flight: nothing lost, nothing told twice, nothing computed in vain."""

from __future__ import annotations

import pytest

from helpers.core import (
    add,
    check_idle,
    check_invariants,
    create_core,
    create_executor,
    create_request,
    create_scheduler,
    planned,
    run_to_end,
    settle,
)
from helpers.fake_executor import endless, generate_alone
from tokenmill.contracts.request import FinishReason


class Driver:
    """Submits and settles by hand, on a fake device."""

    def __init__(self, **kwargs):
        self.scheduler = create_scheduler(max_steps_in_flight=2, **kwargs)
        self.executor = create_executor(self.scheduler, next_token=endless)
        self.in_flight = []
        self.tokens = {}

    def submit(self):
        plan = self.scheduler.schedule()
        if plan.req_ids:
            self.executor.execute_model(plan)
            self.in_flight.append((plan, self.executor.sample_tokens(None)))
        check_invariants(self.scheduler)
        return plan

    def settle(self):
        plan, future = self.in_flight.pop(0)
        outputs = self.scheduler.update_from_output(plan, future.result()).outputs
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        check_invariants(self.scheduler)
        return outputs

    def expected(self, request):
        return generate_alone(request, self.scheduler, endless).token_ids


def test_counters_move_when_a_step_is_planned():
    driver = Driver()
    (data,) = add(driver.scheduler, create_request(6))
    request = driver.scheduler.requests[data.request_id]

    def counters():
        return (
            request.num_tokens,
            request.num_computed_tokens,
            request.num_settled_tokens,
            request.num_output_placeholders,
        )

    driver.submit()
    assert counters() == (6, 6, 0, 1)
    driver.submit()
    assert counters() == (6, 7, 0, 2)
    driver.settle()
    assert counters() == (7, 7, 6, 1)
    driver.settle()
    assert counters() == (8, 7, 7, 0)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_exactly_max_tokens_although_steps_run_ahead(max_tokens):
    core, executor = create_core(max_steps_in_flight=2, next_token=endless)
    request = create_request(6, max_tokens=max_tokens)
    core.add_request(request)
    collected = run_to_end(core).requests[request.request_id]
    assert len(collected.token_ids) == max_tokens
    assert collected.last.finish_reason is FinishReason.LENGTH
    assert len(executor.plans) == max_tokens


def test_a_stop_drops_what_runs_ahead():
    driver = Driver()
    data = create_request(6, max_tokens=9)
    data.eos_token_id = driver.expected(data)[1]
    add(driver.scheduler, data)
    driver.submit()
    driver.submit()
    driver.settle()
    driver.submit()
    assert [output.finish_reason for output in driver.settle()] == [FinishReason.STOP]
    assert driver.settle() == []
    assert driver.tokens[data.request_id] == driver.expected(data)
    check_idle(driver.scheduler)


@pytest.mark.parametrize("num_settled", [0, 1, 2])
def test_abort_with_steps_in_flight(num_settled):
    driver = Driver()
    victim, other = add(driver.scheduler, create_request(6), create_request(6, max_tokens=3))
    driver.submit()
    driver.submit()
    for _ in range(num_settled):
        driver.settle()
    driver.scheduler.abort_requests([victim.request_id])
    check_invariants(driver.scheduler)
    while driver.in_flight:
        driver.settle()
    while driver.scheduler.has_requests():
        driver.submit()
        driver.settle()
    assert len(driver.tokens.get(victim.request_id, [])) == num_settled
    assert driver.tokens[other.request_id] == driver.expected(other)
    check_idle(driver.scheduler)


def test_a_preempted_request_keeps_its_token_in_flight_and_resumes_after_it():
    """`b` loses its blocks while its result is on the way."""
    driver = Driver(num_blocks=6)
    a, b = add(driver.scheduler, create_request(7, max_tokens=9), create_request(7, max_tokens=9))
    driver.submit()
    driver.submit()
    driver.settle()
    # Both compute position 8 now and need a third block; one is free.
    assert driver.submit().req_ids == [a.request_id]
    request = driver.scheduler.requests[b.request_id]
    assert (request.num_steps_in_flight, request.num_tokens) == (1, 8)
    driver.scheduler.abort_requests([a.request_id])  # room enough, but not settled yet
    assert driver.submit().req_ids == []
    assert request.wait_reason == "output in flight"
    assert [output.new_token_ids for output in driver.settle()] == [driver.expected(b)[1:2]]
    assert (request.num_tokens, request.num_computed_tokens) == (9, 0)
    plan = driver.submit()
    assert planned(plan) == {b.request_id: 5}  # 4 of its 9 tokens were found in the cache
    while driver.in_flight or driver.scheduler.has_requests():
        driver.submit()
        driver.settle()
    assert driver.tokens[b.request_id] == driver.expected(b)
    check_idle(driver.scheduler)


def test_a_preempted_request_may_end_with_its_token_in_flight():
    driver = Driver(num_blocks=6)
    a, b = create_request(7, max_tokens=9), create_request(7, max_tokens=9)
    b.eos_token_id = driver.expected(b)[1]
    add(driver.scheduler, a, b)
    driver.submit()
    driver.submit()
    driver.settle()
    assert driver.submit().req_ids == [a.request_id]
    outputs = {output.request_id: output for output in driver.settle()}
    assert outputs[b.request_id].finish_reason is FinishReason.STOP
    assert outputs[b.request_id].num_preemptions == 1
    assert len(driver.scheduler.waiting) == 0


def test_chunks_in_flight_are_not_cached_before_they_settle():
    driver = Driver(max_num_batched_tokens=4)
    add(driver.scheduler, create_request(list(range(30, 42))))
    driver.submit()
    driver.submit()
    cached = [block for block in driver.scheduler.kv.pool.blocks if block.key is not None]
    assert cached == []
    driver.settle()
    cached = [block.block_id for block in driver.scheduler.kv.pool.blocks if block.key is not None]
    assert cached == [1]


def test_prefix_hits_appear_although_caching_waits_for_results():
    core, _ = create_core(max_steps_in_flight=2, next_token=endless)
    prompt = list(range(30, 43))
    first, second = create_request(prompt), create_request(prompt)
    core.add_request(first)
    core.step()
    core.add_request(second)
    collected = run_to_end(core).requests[second.request_id]
    assert collected.last.num_cached_tokens == 12


def test_a_reset_with_steps_in_flight_loses_no_token():
    driver = Driver()
    requests = add(driver.scheduler, *(create_request(7, max_tokens=6) for _ in range(3)))
    driver.submit()
    driver.submit()
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    while driver.in_flight or driver.scheduler.has_requests():
        if driver.in_flight:
            driver.settle()
        driver.submit()
    for request in requests:
        assert driver.tokens[request.request_id] == driver.expected(request)
    check_idle(driver.scheduler)


def test_plans_settle_in_their_order():
    scheduler = create_scheduler()
    add(scheduler, create_request(6))
    scheduler.schedule()
    second = scheduler.schedule()
    with pytest.raises(AssertionError, match="in the order"):
        settle(scheduler, second)


def test_with_speculation_a_row_waits_for_its_sample():
    """The drafts of a row come with the sample in flight; prompt chunks still run ahead."""
    scheduler = create_scheduler(num_speculative_tokens=2, max_num_batched_tokens=4)
    (data,) = add(scheduler, create_request(7, max_tokens=9))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (planned(first), planned(second)) == ({data.request_id: 4}, {data.request_id: 3})
    assert scheduler.schedule().req_ids == []
    settle(scheduler, first)
    assert scheduler.schedule().req_ids == []
    settle(scheduler, second, draft_token_ids={data.request_id: [5, 6]})
    assert planned(scheduler.schedule()) == {data.request_id: 3}
