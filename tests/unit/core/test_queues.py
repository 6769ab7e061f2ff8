"""Queues and rows: order, removal, and agreement with a sorted list."""

from __future__ import annotations

import random

import pytest

from helpers.core import create_request
from tokenmill.core.policy import get_policy
from tokenmill.core.queues import FCFSRequestQueue, PriorityRequestQueue
from tokenmill.core.request import Request
from tokenmill.core.rows import RowAllocator
from tokenmill.errors import ConfigError


def make(request_id, priority=0, arrival_time=0.0):
    data = create_request(2, request_id=request_id, priority=priority, arrival_time=arrival_time)
    return Request(data, max_total_tokens=100)


def drain(queue):
    return [queue.pop().request_id for _ in range(len(queue))]


def test_fcfs_keeps_the_order_and_prepends_to_the_front():
    queue = FCFSRequestQueue()
    a, b, c = make("a"), make("b"), make("c")
    for request in (a, b, c):
        queue.add(request)
    assert queue.pop() is a
    queue.prepend(a)
    queue.remove(b)
    assert queue.peek() is a
    assert drain(queue) == ["a", "c"]


def test_priority_then_arrival_then_id():
    queue = PriorityRequestQueue()
    for request in (make("d", 1, 0.0), make("b", 0, 2.0), make("a", 0, 2.0), make("c", 0, 1.0)):
        queue.add(request)
    assert drain(queue) == ["c", "a", "b", "d"]


@pytest.mark.parametrize("seed", range(5))
def test_priority_queue_equals_a_sorted_list(seed):
    rnd = random.Random(seed)
    queue, model = PriorityRequestQueue(), []
    for number in range(600):
        action = rnd.random()
        if action < 0.5 or not model:
            request = make(f"r{number}", rnd.randrange(4), float(rnd.randrange(9)))
            (queue.add if rnd.random() < 0.5 else queue.prepend)(request)
            model.append(request)
            model.sort(key=lambda request: request.sort_key)
        elif action < 0.8:
            queue.remove(model.pop(rnd.randrange(len(model))))
        else:
            assert queue.peek() is model[0]
            assert queue.pop() is model.pop(0)
        assert len(queue) == len(model)
    assert drain(queue) == [request.request_id for request in model]


def test_removed_requests_do_not_pile_up_in_the_heap():
    queue = PriorityRequestQueue()
    queue.add(make("first", -1))
    for number in range(1000):
        request = make(f"r{number}")
        queue.add(request)
        queue.remove(request)
    assert len(queue._heap) < 100
    assert drain(queue) == ["first"]


def test_the_smallest_free_row_is_taken_first():
    rows = RowAllocator(4)
    assert [rows.take() for _ in range(4)] == [0, 1, 2, 3]
    for row in (3, 1, 2):
        rows.release(row)
    assert rows.num_free == 3
    assert [rows.take() for _ in range(3)] == [1, 2, 3]


def test_an_unknown_policy_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"'prioritty'.*fcfs, priority.*'priority'"):
        get_policy("prioritty")
