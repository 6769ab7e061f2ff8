"""Requests wait for a slot of their adapter, hold up nobody, and none waits for ever."""

from __future__ import annotations

import itertools
import random

import pytest

from helpers.core import create_request, create_scheduler, settle
from tokenmill.contracts.request import AdapterRef
from tokenmill.core.adapters import AdapterReady
from tokenmill.features.lora.slots import WAIT_REASON, AdapterSlots

numbers = itertools.count()


@pytest.fixture(autouse=True)
def count_from_zero(monkeypatch):
    monkeypatch.setattr(f"{__name__}.numbers", itertools.count())


def ref(name):
    return None if name == "-" else AdapterRef(name, f"load-{name}")


def add(scheduler, *names, max_tokens=4):
    """Requests `a0`, `b1`, ... of the adapters a, b, ...; `-` is none."""
    ids = []
    for name in names:
        request_id = f"{name}{next(numbers)}"
        scheduler.add_request(
            create_request(
                3,
                request_id=request_id,
                max_tokens=max_tokens,
                eos_token_id=None,
                adapter=ref(name),
            )
        )
        ids.append(request_id)
    return ids


def with_slots(max_loras, **kwargs):
    return create_scheduler(readiness_rules=[AdapterReady(max_loras)], **kwargs)


def test_those_without_a_slot_wait_and_the_others_pass_by():
    scheduler = with_slots(2)
    add(scheduler, "a", "b", "c", "-", "b", "d")
    plan = scheduler.schedule()
    assert plan.req_ids == ["a0", "b1", "-3", "b4"]
    assert scheduler.requests["c2"].wait_reason == WAIT_REASON
    assert scheduler.requests["d5"].wait_reason == WAIT_REASON
    assert [each.adapter for each in plan.scheduled_new_reqs] == [
        ref("a"),
        ref("b"),
        None,
        ref("b"),
    ]


def test_the_adapter_with_the_fewest_requests_gives_its_slot_up():
    scheduler = with_slots(2)
    add(scheduler, "a", "a", "b", "c", "b", "a", "-")
    plan = scheduler.schedule()
    # c is to get b's slot: b's later request waits behind it, a's does not.
    assert plan.req_ids == ["a0", "a1", "b2", "a5", "-6"]
    settle(scheduler, plan)
    scheduler.abort_requests(["b2"])
    assert scheduler.schedule().req_ids[-1] == "c3"
    assert scheduler.requests["b4"].wait_reason == WAIT_REASON


def test_a_choice_stands_while_others_come_and_go():
    slots = AdapterSlots(2)
    slots.begin_pass([ref("a"), ref("a"), ref("b")])
    assert slots.wait_reason(ref("c"))
    assert slots.wait_reason(ref("b"))
    slots.begin_pass([ref("a"), ref("b"), ref("b")])  # a has fewer now
    assert slots.wait_reason(ref("c"))
    assert slots.wait_reason(ref("b"))
    assert slots.wait_reason(ref("a")) is None
    slots.begin_pass([ref("a"), ref("b")])  # c has gone
    assert slots.wait_reason(ref("b")) is None


def test_more_may_wait_than_slots_are_given_up():
    slots = AdapterSlots(2)
    slots.begin_pass([ref("a"), ref("b")])
    assert all(slots.wait_reason(ref(name)) for name in "cdecde")
    assert slots.wait_reason(ref("a"))
    assert slots.wait_reason(None) is None


def test_a_pass_counts_what_it_lets_in():
    slots = AdapterSlots(1)
    slots.begin_pass([])
    assert slots.wait_reason(ref("a")) is None
    assert slots.wait_reason(ref("b"))
    assert slots.wait_reason(AdapterRef("another name", "load-a"))  # b comes before it


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_nobody_starves_beside_a_stream_of_requests_for_the_others(policy):
    scheduler = with_slots(2, max_num_seqs=4, policy=policy)
    (late,) = add(scheduler, "a", "b", "a", "c")[-1:]
    for _ in range(20):
        add(scheduler, "a", "b")  # there is always another one of both
        plan = scheduler.schedule()
        if late in plan.req_ids:
            return
        settle(scheduler, plan)
    raise AssertionError("it never started")


@pytest.mark.parametrize("max_loras", [1, 2, 3])
def test_any_order_keeps_the_limit_and_comes_to_its_end(max_loras):
    rng = random.Random(max_loras)
    # Few blocks, so that requests are preempted now and then.
    scheduler = with_slots(max_loras, max_num_seqs=5, num_blocks=12)
    started = set()
    for step in range(400):
        if step < 80:
            add(scheduler, rng.choice("abcd-"), max_tokens=rng.randint(1, 9))
            if rng.random() < 0.1:
                scheduler.abort_requests([rng.choice(list(scheduler.requests))])
        plan = scheduler.schedule()
        started.update(plan.req_ids)
        running = {r.data.adapter.name for r in scheduler.running.values() if r.data.adapter}
        assert len(running) <= max_loras
        if plan.req_ids:
            settle(scheduler, plan)
        if step >= 80 and not scheduler.requests:
            return
    raise AssertionError("requests are left")
