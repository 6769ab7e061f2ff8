"""Who is let in, and what whoever is not gets to hear."""

from __future__ import annotations

import pytest

from tokenmill.engine.queue_limit import QueueLimit
from tokenmill.errors import InvalidRequestError, QueueFullError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def limit(clock=None, max_running=2, max_queue=3, max_tokens=100):
    return QueueLimit(
        max_running=max_running, max_queue=max_queue, max_tokens=max_tokens, clock=clock or Clock()
    )


def test_running_and_waiting_sequences_are_counted_together():
    queue = limit()
    assert queue.is_empty
    queue.enter(4)
    queue.enter(1)
    with pytest.raises(QueueFullError, match="max_num_seqs=2 and max_queue=3"):
        queue.enter(1)
    queue.leave(1, 0)
    with pytest.raises(QueueFullError):
        queue.enter(2)
    queue.enter(1)
    queue.leave(5, 0)
    assert queue.is_empty


def test_more_than_there_could_ever_be_room_for_is_the_users_fault():
    queue = limit()
    with pytest.raises(InvalidRequestError, match=r"n=6 .* 5 ") as caught:
        queue.enter(6)
    assert caught.value.parameter == "n"
    queue.enter(5)


def test_tokens_are_bounded_but_one_request_always_fits():
    queue = limit()
    queue.enter(1)
    queue.enter_tokens(1000)
    queue.enter(1)
    with pytest.raises(QueueFullError, match=r"1000 tokens.*max_queue_tokens"):
        queue.enter_tokens(1)
    queue.leave(1, 1000)
    queue.enter_tokens(60)
    queue.enter_tokens(40)


def test_advice_is_the_time_in_which_the_queue_will_have_started():
    clock = Clock()
    queue = limit(clock, max_running=1, max_queue=5)

    def refused() -> float:
        with pytest.raises(QueueFullError) as caught:
            queue.enter(1)
        return caught.value.retry_after

    queue.enter(6)
    assert refused() == 1.0  # nothing is known yet
    for _ in range(200):  # one ends every four seconds, and another one comes
        clock.now += 4.0
        queue.leave(1, 0)
        queue.record_end(1)
        queue.enter(1)
    assert refused() == pytest.approx(20.0)
    for _ in range(200):
        clock.now += 400.0
        queue.leave(1, 0)
        queue.record_end(1)
        queue.enter(1)
    assert refused() == 60.0


def test_idle_time_says_nothing_about_the_pace():
    clock = Clock()
    queue = limit(clock, max_running=1, max_queue=1)
    for _ in range(100):
        queue.enter(1)
        clock.now += 1000.0
        queue.leave(1, 0)
        queue.record_end(1)
    queue.enter(2)
    with pytest.raises(QueueFullError) as caught:
        queue.enter(1)
    assert caught.value.retry_after == 1.0
