"""Who gives way, what it keeps, and that everybody ends."""

from __future__ import annotations

import pytest

from helpers.core import (
    add,
    check_invariants,
    create_core,
    create_request,
    create_scheduler,
    planned,
    run_to_end,
    settle,
)
from helpers.fake_executor import endless, generate_alone
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.core.step import Step


def test_fcfs_preempts_the_last_and_resumes_it_in_front():
    scheduler = create_scheduler(num_blocks=5, max_num_seqs=3)
    add(scheduler, *(create_request(7, request_id=name, max_tokens=9) for name in "ab"))
    add(scheduler, create_request(2, request_id="c"))
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan.req_ids == ["a", "b"]
        settle(scheduler, plan)
    plan = scheduler.schedule()  # both need a third block
    assert plan.req_ids == ["a"]
    assert plan.finished_rows == [1]
    assert scheduler.waiting.peek().request_id == "b"
    assert scheduler.requests["b"].num_tokens == 9
    settle(scheduler, plan)
    assert scheduler.schedule().req_ids == ["a"]  # b is first, and does not fit


def test_a_resumed_request_is_sent_as_new_with_its_output():
    core, executor = create_core(next_token=endless, num_blocks=5, max_num_seqs=2)
    a, b = create_request(7, max_tokens=9), create_request(7, max_tokens=9)
    core.add_request(a)
    core.add_request(b)
    collector = run_to_end(core)
    sent = [new for plan in executor.plans for new in plan.scheduled_new_reqs]
    resumed = [new for new in sent if new.req_id == b.request_id][1]
    assert len(resumed.token_ids) == 9
    assert resumed.num_prompt_tokens == 7
    last = collector.requests[b.request_id].last
    assert last.num_preemptions == core.scheduler.make_stats().num_preemptions == 1
    expected = generate_alone(b, core.scheduler, endless).token_ids
    assert collector.requests[b.request_id].token_ids == expected


def test_b077_a_victim_that_was_scheduled_in_this_step_is_undone():
    """`low`, first in the list, takes the last block; `high`, behind it, needs one as well."""
    scheduler = create_scheduler(num_blocks=7, policy="priority")
    add(scheduler, create_request(8, request_id="low", priority=9, max_tokens=9))
    settle(scheduler, scheduler.schedule())
    add(scheduler, create_request(5, request_id="high", priority=0, max_tokens=9))
    for _ in range(4):
        plan = scheduler.schedule()
        assert plan.req_ids == ["low", "high"]
        settle(scheduler, plan)
    assert scheduler.kv.pool.num_free_blocks == 1
    plan = scheduler.schedule()
    assert planned(plan) == {"high": 1}
    assert (plan.rows, plan.num_logits, plan.is_sampled) == ([1], [1], [True])
    assert (plan.finished_rows, plan.scheduled_cached_reqs.rows) == ([0], [1])
    low = scheduler.requests["low"]
    assert (low.row, low.num_computed_tokens, low.num_steps_in_flight) == (None, 0, 0)
    settle(scheduler, plan)
    plan = scheduler.schedule()
    assert planned(plan) == {"high": 1}  # `low` is ready, but does not fit


def test_b077_undoing_restores_lists_and_budget():
    scheduler = create_scheduler()
    add(scheduler, *(create_request(6, request_id=name) for name in "abc"))
    settle(scheduler, scheduler.schedule())
    a, b, c = scheduler.running.values()
    b.draft_token_ids = [5, 6]
    chunks = scheduler._chunks
    step, expected = (Step(SchedulerOutput(1), 10, chunks) for _ in range(2))
    for request, count in ((a, 1), (b, 3), (c, 1)):
        step.add(request, count)
        step.add_block_ids(request, ([7],))
    step.remove(b)
    for request in (a, c):
        expected.add(request, 1)
        expected.add_block_ids(request, ([7],))
    assert step == expected
    assert step.token_budget == 8


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2])
def test_b079_nobody_is_preempted_while_one_ranked_behind_runs(policy, depth):
    core, _ = create_core(
        next_token=endless, num_blocks=9, max_num_seqs=4, policy=policy, max_steps_in_flight=depth
    )
    scheduler = core.scheduler
    requests = [create_request(5 + number % 3, max_tokens=14) for number in range(12)]
    for request in requests:
        core.add_request(request)
    num_steps = 0
    while core.has_requests():
        before = dict(scheduler.running)
        core.step()
        check_invariants(scheduler)
        preempted = [name for name in before if name in scheduler.requests]
        preempted = [name for name in preempted if not scheduler.requests[name].is_running]
        for name in preempted:
            rank = scheduler.requests[name].sort_key
            assert all(other.sort_key < rank for other in scheduler.running.values())
            assert scheduler.requests[name].data.arrival_time == rank[1]
        num_steps += 1
        assert num_steps < 12 * 25
    assert scheduler.make_stats().num_preemptions > 0


def test_b079_a_preempted_request_waits_before_later_arrivals():
    scheduler = create_scheduler(num_blocks=7, max_num_seqs=3)
    add(scheduler, *(create_request(7, request_id=name, max_tokens=12) for name in "abc"))
    while not any(request.num_preemptions for request in scheduler.requests.values()):
        settle(scheduler, scheduler.schedule())
    add(scheduler, create_request(2, request_id="d"))
    assert [scheduler.waiting.pop().request_id for _ in range(2)] == ["c", "d"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_priority_order_of_admission(policy):
    scheduler = create_scheduler(policy=policy, max_num_seqs=3)
    for name, priority, arrival in [("a", 5, 0.0), ("b", 1, 2.0), ("c", 1, 1.0), ("d", 0, 9.0)]:
        add(scheduler, create_request(4, request_id=name, priority=priority, arrival_time=arrival))
    expected = {"fcfs": ["a", "b", "c"], "priority": ["d", "c", "b"]}
    assert scheduler.schedule().req_ids == expected[policy]
