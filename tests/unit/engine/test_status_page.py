"""What the core's process leaves behind for whoever survives it."""

from __future__ import annotations

import os
import threading

import pytest

from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.engine.status_page import StatusPage


@pytest.fixture
def pages():
    """The front end's view and the core's, of a page for two steps of three requests."""
    front_end = StatusPage.create(max_steps_in_flight=2, max_num_seqs=3)
    core = StatusPage(os.dup(front_end.fd))
    yield front_end, core
    core.close()
    front_end.close()


def plan(step_id: int, *ids: str) -> SchedulerOutput:
    return SchedulerOutput(step_id, req_ids=list(ids))


def test_steps_under_way_are_seen_from_the_other_side(pages):
    front_end, core = pages
    assert front_end.under_way() == []
    first, second, third = plan(0, "a", "b"), plan(1, "c"), plan(2, "a", "b", "c")
    core.begin(first)
    assert front_end.under_way() == ["a", "b"]
    core.begin(second)
    assert sorted(front_end.under_way()) == ["a", "b", "c"]
    core.end(first)
    assert front_end.under_way() == ["c"]
    core.begin(third)
    core.end(second)
    assert front_end.under_way() == ["a", "b", "c"]
    core.end(third)
    assert front_end.under_way() == []


def test_a_request_being_queued_counts_as_under_way(pages):
    front_end, core = pages
    core.begin(plan(0, "a"))
    core.begin_intake("new")
    assert sorted(front_end.under_way()) == ["a", "new"]
    core.begin_intake("newer")
    core.end(plan(0, "a"))
    assert front_end.under_way() == ["newer"]
    core.end_intake()
    assert front_end.under_way() == []


def test_the_longest_ids_of_a_full_step_fit(pages):
    front_end, core = pages
    ids = [f"{number:031d}.{number:05d}" for number in range(3)]
    core.begin(plan(7, *ids))
    assert front_end.under_way() == ids


def test_signs_of_life_and_turns(pages):
    front_end, core = pages
    assert front_end.core_silence() < 1.0
    before = front_end.core_beat
    core.beat_core()
    assert front_end.core_beat > before
    assert core.front_end_silence() < 1.0
    core._words[1] -= 20_000_000_000
    assert 20.0 <= core.front_end_silence() < 21.0
    front_end.beat_front_end()
    assert core.front_end_silence() < 1.0
    core.turn()
    core.turn()
    assert front_end.num_turns == 2


def test_a_reader_never_sees_half_of_a_step(pages):
    front_end, core = pages
    steps = [plan(number, *(f"{number}-{i}" for i in range(3))) for number in range(2)]
    stop = threading.Event()
    seen = []

    def read():
        while not stop.is_set():
            seen.append(front_end.under_way())

    reader = threading.Thread(target=read)
    reader.start()
    for round_number in range(3000):
        step = steps[round_number % 2]
        core.begin(step)
        core.end(step)
    stop.set()
    reader.join()
    # A step's ids are all there or none; both slots may be caught by one look.
    assert {tuple(ids) for ids in seen} <= {
        (),
        tuple(steps[0].req_ids),
        tuple(steps[1].req_ids),
        tuple(steps[0].req_ids + steps[1].req_ids),
    }
