"""Drafted tokens: when they are scheduled, and what is left of them."""

from __future__ import annotations

import pytest

from helpers.core import add, create_core, create_request, create_scheduler, planned, settle
from helpers.fake_executor import endless
from tokenmill.core.decoding import steps_in_place


def test_drafts_wait_until_the_prompt_is_computed():
    scheduler = create_scheduler(max_num_batched_tokens=4, num_speculative_tokens=2)
    (data,) = add(scheduler, create_request(6, max_tokens=20))
    drafts = {"draft_token_ids": {data.request_id: [5, 6]}}
    settle(scheduler, scheduler.schedule(), **drafts)  # middle of the prompt: dropped
    plan = scheduler.schedule()
    assert (planned(plan), plan.draft_token_ids) == ({data.request_id: 2}, {})
    settle(scheduler, plan, **drafts)
    plan = scheduler.schedule()
    assert plan.draft_token_ids == {data.request_id: [5, 6]}
    assert (plan.num_scheduled_tokens, plan.num_logits) == ([3], [3])


@pytest.mark.parametrize(("accepted", "computed"), [(0, 7), (1, 8), (2, 9)])
def test_rejected_drafts_are_subtracted(accepted, computed):
    scheduler = create_scheduler(num_speculative_tokens=2)
    (data,) = add(scheduler, create_request(6, max_tokens=20))
    request = scheduler.requests[data.request_id]
    settle(scheduler, scheduler.schedule(), draft_token_ids={data.request_id: [5, 6, 7]})
    plan = scheduler.schedule()
    assert request.num_computed_tokens == 9
    settle(scheduler, plan, {data.request_id: [5, 6, 9][: accepted + 1]})
    assert request.num_computed_tokens == request.num_settled_tokens == computed
    assert request.num_output_placeholders == 0
    assert request.draft_token_ids == []


def test_drafts_are_cut_to_the_budget_and_to_max_tokens():
    scheduler = create_scheduler(max_num_batched_tokens=6, num_speculative_tokens=3)
    a, b = add(scheduler, create_request(2, max_tokens=20), create_request(2, max_tokens=3))
    drafts = {a.request_id: [5, 6, 7], b.request_id: [5, 6, 7]}
    settle(scheduler, scheduler.schedule(), draft_token_ids=drafts)
    plan = scheduler.schedule()
    assert plan.draft_token_ids == {a.request_id: [5, 6, 7], b.request_id: [5]}


def test_drafts_leave_a_token_of_the_step_to_everybody():
    scheduler = create_scheduler(max_num_batched_tokens=6, num_speculative_tokens=4)
    requests = add(scheduler, *(create_request(1, max_tokens=20) for _ in range(4)))
    names = [request.request_id for request in requests]
    settle(scheduler, scheduler.schedule(), draft_token_ids={names[1]: [5, 6, 7], names[3]: [8]})
    plan = scheduler.schedule()
    assert planned(plan) == dict(zip(names, [1, 3, 1, 1], strict=True))
    assert plan.draft_token_ids == {names[1]: [5, 6]}


def test_what_became_of_drafts_is_counted():
    scheduler = create_scheduler(num_speculative_tokens=3, num_lookahead_tokens=0)
    a, b = add(scheduler, create_request(6, max_tokens=20), create_request(6, max_tokens=20))
    drafts = {a.request_id: [5, 6, 7], b.request_id: [5, 6]}
    settle(scheduler, scheduler.schedule(), draft_token_ids=drafts)
    came = {a.request_id: [5, 6, 9], b.request_id: [9]}
    outputs = settle(scheduler, scheduler.schedule(), came).values()
    stats = scheduler.make_stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 5, 2)
    assert stats.num_accepted_tokens_per_pos == [1, 1, 0]
    counts = [(output.num_draft_tokens, output.num_accepted_tokens) for output in outputs]
    assert counts == [(3, 2), (2, 0)]


def test_a_request_without_drafts_decodes_in_place_where_nobody_writes_ahead():
    """Slots ahead are for a drafter's own KV; drafts get theirs when they are planned."""
    scheduler = create_scheduler(num_speculative_tokens=3, num_lookahead_tokens=0)
    (data,) = add(scheduler, create_request(4, max_tokens=20))
    settle(scheduler, scheduler.schedule(), draft_token_ids={data.request_id: [5, 6, 7]})
    request = scheduler.requests[data.request_id]
    assert request.num_slots == 4
    settle(scheduler, scheduler.schedule(), {data.request_id: [9]})
    assert request.num_slots == 8
    assert steps_in_place(request) == 3  # to the last slot
    plan = scheduler.schedule()
    assert planned(plan) == {data.request_id: 1}


def test_the_fake_device_notices_a_block_with_another_prefix():
    """The checker itself: a stale block under a row's table is an error."""
    core, executor = create_core(next_token=endless)
    core.add_request(create_request(9, max_tokens=6))
    core.step()
    executor.slots[1, 2] = 0, 1
    with pytest.raises(AssertionError, match="holds another prefix"):
        core.step()
