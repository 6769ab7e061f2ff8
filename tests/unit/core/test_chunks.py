"""Chunks of prompts get smaller the longer their past is, so that steps take about as long."""

from __future__ import annotations

import pytest

from helpers.core import (
    add,
    create_kv_cache_config,
    create_request,
    create_scheduler,
    planned,
    settle,
)
from tokenmill.config.engine_config import SchedulerConfig
from tokenmill.core.chunks import PROMPTS_SHARE, SLACK, SMALLEST, SMALLEST_SHARE, ChunkSizes

BUDGET = 64


def chunk_sizes(cost: float, windows: list[int | None], shared_tokens: int = 0) -> ChunkSizes:
    config = SchedulerConfig(
        4, BUDGET, 4096, 0, True, "fcfs", 1, attention_cost=cost, shared_tokens=shared_tokens
    )
    return ChunkSizes(config, create_kv_cache_config(windows=windows).groups)


@pytest.mark.parametrize("windows", [[None], [None, 100], [100], [7, None, 1000]])
def test_work_is_that_of_each_token_and_key(windows):
    chunks, cost = chunk_sizes(0.25, windows), 0.25
    for first, count in ((0, 1), (0, 50), (90, 30), (1000, 1), (3000, 64)):
        keys = sum(
            min(position + 1, window or 4096)
            for position in range(first, first + count)
            for window in windows
        )
        assert chunks.work(first, count) == pytest.approx(count + cost * keys)


def test_what_fits_is_the_most_that_does():
    chunks = chunk_sizes(0.01, [None, 100])
    for first in (0, 10, 100, 500, 4000):
        for work in (0.0, 20.0, 96.0, 1e3):
            count = chunks.fitting(first, 200, work, 0.0)
            assert SMALLEST <= count <= 200
            assert count == SMALLEST or chunks.work(first, count) <= work
            assert count == 200 or chunks.work(first, count + 1) > work


def test_behind_another_prompt_less_than_the_smallest_chunk_is_none():
    chunks = chunk_sizes(0.01, [None])
    for first in (0, 100, 4000):
        smallest = chunks.work(first, SMALLEST)
        assert chunks.fitting(first, 200, 50.0 + smallest, 50.0) == SMALLEST
        assert chunks.fitting(first, 200, 49.9 + smallest, 50.0) == 0
        assert chunks.fitting(first, SMALLEST, 0.0, 50.0) == SMALLEST


def test_prompts_have_what_is_left_of_a_shared_step_or_a_share_beside_many_requests():
    chunks = chunk_sizes(0.0, [None], shared_tokens=48)
    assert chunks.room(0) == SLACK * BUDGET
    assert chunks.room(1) == 47
    assert chunks.room(14) == 34
    assert chunks.room(16) == SMALLEST_SHARE
    assert chunks.room(20) == PROMPTS_SHARE * 20
    assert chunks.room(40) == SLACK * BUDGET - 40
    assert chunks.room(70) == SLACK * BUDGET - 70
    assert chunk_sizes(0.0, [None]).room(20) == SLACK * BUDGET - 20


def prompt_chunks(scheduler, request_id):
    """Chunks of one request while all run to their ends."""
    chunks = []
    while scheduler.requests:
        plan = scheduler.schedule()
        counts = planned(plan)
        if request_id in counts and counts[request_id] > 1:
            chunks.append(counts[request_id])
        settle(scheduler, plan)
    return chunks


def test_a_long_prompt_takes_fewer_tokens_the_further_it_is():
    scheduler = create_scheduler(
        max_num_batched_tokens=BUDGET, max_model_len=2048, attention_cost=1 / 256
    )
    add(scheduler, create_request(2000, request_id="long"), create_request(4, request_id="short"))
    chunks = prompt_chunks(scheduler, "long")
    assert sum(chunks) == 2000
    assert chunks[0] == BUDGET  # half as much again is allowed
    assert chunks[:-1] == sorted(chunks[:-1], reverse=True)
    assert SMALLEST <= chunks[-2] < BUDGET / 4
    done = 0
    for chunk in chunks:
        work = chunk + sum(range(done + 1, done + chunk + 1)) / 256
        assert work <= SLACK * BUDGET
        done += chunk


def test_others_with_a_long_past_leave_less_for_a_prompt():
    scheduler = create_scheduler(
        max_num_batched_tokens=BUDGET, max_model_len=2048, attention_cost=1 / 64
    )
    others = [create_request([7 + i] * 1000, request_id=f"{i}", max_tokens=100) for i in range(2)]
    add(scheduler, *others)
    while any(request.num_pending_tokens > 1 for request in scheduler.requests.values()):
        settle(scheduler, scheduler.schedule())
    add(scheduler, create_request(512, request_id="long"))
    counts = planned(scheduler.schedule())
    long = counts.pop("long")
    assert counts == {"0": 1, "1": 1}
    assert SMALLEST < long < BUDGET - 2
    taken = sum(
        1 + request.num_computed_tokens / 64
        for request in scheduler.running.values()
        if request.request_id != "long"
    )

    def work(count: int) -> float:
        return taken + count + count * (count + 1) / 2 / 64

    assert work(long) <= SLACK * BUDGET < work(long + 1)


def test_without_a_cost_chunks_are_the_budget():
    scheduler = create_scheduler(max_num_batched_tokens=BUDGET, max_model_len=2048)
    add(scheduler, create_request(2000, request_id="long"))
    assert set(prompt_chunks(scheduler, "long")[:-1]) == {BUDGET}


def test_small_steps_come_forward_behind_any_past():
    scheduler = create_scheduler(max_num_batched_tokens=4, max_model_len=256, attention_cost=1.0)
    add(scheduler, create_request(200, request_id="a"), create_request(200, request_id="b"))
    assert sum(prompt_chunks(scheduler, "b")) >= 199
    assert not scheduler.requests


def decoding(scheduler, num_requests):
    """Start so many requests with short prompts, and let them get their first tokens."""
    others = [create_request([9 + i] * 4, request_id=f"{i}", max_tokens=200) for i in range(8)]
    add(scheduler, *others[:num_requests])
    settle(scheduler, scheduler.schedule())
    assert all(request.decodes for request in scheduler.running.values())


@pytest.mark.parametrize(("num_decoding", "chunk"), [(0, 64), (1, 47), (8, 40)])
def test_beside_requests_that_decode_a_prompt_takes_less(num_decoding, chunk):
    scheduler = create_scheduler(
        max_num_batched_tokens=BUDGET, max_model_len=1024, shared_tokens=48
    )
    if num_decoding:
        decoding(scheduler, num_decoding)
    add(scheduler, create_request(500, request_id="long"))
    counts = planned(scheduler.schedule())
    assert counts.pop("long") == chunk
    assert list(counts.values()) == [1] * num_decoding


def test_once_nobody_decodes_the_chunks_are_large_again():
    scheduler = create_scheduler(
        max_num_batched_tokens=BUDGET, max_model_len=1024, shared_tokens=40
    )
    decoding(scheduler, 1)
    add(scheduler, create_request(500, request_id="long"))
    settle(scheduler, scheduler.schedule())
    scheduler.abort_requests(["0"])
    assert planned(scheduler.schedule()) == {"long": BUDGET}


def test_prompts_in_one_step_share_what_is_left():
    scheduler = create_scheduler(
        max_num_batched_tokens=BUDGET, max_model_len=1024, shared_tokens=48
    )
    decoding(scheduler, 2)
    prompts = [create_request([50 + i] * 20, request_id=name) for i, name in enumerate("abc")]
    add(scheduler, *prompts)
    plans = []
    while set("abc") & set(scheduler.requests):
        plan = scheduler.schedule()
        plans.append({key: count for key, count in planned(plan).items() if key in "abc"})
        settle(scheduler, plan)
    assert plans[0] == {"a": 20, "b": 20}  # 6 are left, less than the smallest chunk
    assert plans[1]["c"] == 20


def test_a_prompt_in_pieces_leaves_nothing_to_those_behind_it():
    scheduler = create_scheduler(
        max_num_batched_tokens=BUDGET, max_model_len=1024, shared_tokens=48
    )
    decoding(scheduler, 1)
    add(scheduler, create_request(200, request_id="long"), create_request(30, request_id="next"))
    order = []
    while "next" in scheduler.requests:
        plan = scheduler.schedule()
        order.append(planned(plan))
        settle(scheduler, plan)
    assert [step.get("long") for step in order[:5]] == [47, 47, 47, 47, 12]
    assert all("next" not in step for step in order[:4])
    assert order[4]["next"] == 30
