"""Shared prefixes as the scheduler uses them, and prompt log-probabilities."""

from __future__ import annotations

import pytest

from helpers.core import add, create_core, create_request, create_scheduler, run_to_end, settle
from helpers.fake_executor import endless, generate_alone
from tokenmill.contracts.request import AdapterRef


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("length", range(1, 14))
def test_b073_the_second_run_equals_the_first(length, budget):
    core, _ = create_core(max_num_batched_tokens=budget, next_token=endless)
    runs = []
    for _ in range(2):
        request = create_request(list(range(20, 20 + length)), max_tokens=5)
        core.add_request(request)
        runs.append(run_to_end(core).requests[request.request_id])
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[0].last.num_cached_tokens == 0
    assert runs[1].last.num_cached_tokens == (length - 1) // 4 * 4


def cached_tokens(core, **kwargs):
    request = create_request(list(range(30, 43)), **kwargs)
    core.add_request(request)
    collected = run_to_end(core).requests[request.request_id]
    return collected.last.num_cached_tokens, collected.token_ids


def test_b137_only_requests_with_the_same_salt_share():
    core, _ = create_core()
    cold, tokens = cached_tokens(core, cache_salt="a")
    assert cold == 0
    assert cached_tokens(core, cache_salt="b") == (0, tokens)
    assert cached_tokens(core) == (0, tokens)
    assert cached_tokens(core, cache_salt="a") == (12, tokens)


def test_adapters_do_not_share():
    core, _ = create_core()
    assert cached_tokens(core, adapter=AdapterRef("x", "1"))[0] == 0
    assert cached_tokens(core, adapter=AdapterRef("x", "2"))[0] == 0
    assert cached_tokens(core, adapter=AdapterRef("x", "1"))[0] == 12


def test_the_next_turn_of_a_conversation_finds_prompt_and_output():
    core, _ = create_core(next_token=endless)
    first = create_request(list(range(30, 39)), max_tokens=8)
    core.add_request(first)
    output = run_to_end(core).requests[first.request_id].token_ids
    turn = create_request([*first.prompt_token_ids, *output, 5, 6])
    core.add_request(turn)
    # 9 + 8 tokens; the last was sampled and never computed, so 16 are cached.
    assert run_to_end(core).requests[turn.request_id].last.num_cached_tokens == 16


def test_prefix_cache_stats_are_counted_once_at_admission():
    scheduler = create_scheduler(num_blocks=7, max_num_seqs=2)
    prompt = list(range(30, 39))
    add(scheduler, *(create_request(prompt, request_id=name, max_tokens=12) for name in "abc"))
    settle(scheduler, scheduler.schedule())
    stats = scheduler.make_stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 0)
    history = [stats]
    while scheduler.requests:
        settle(scheduler, scheduler.schedule())
        history.append(scheduler.make_stats())
    assert history[-1].num_preemptions > 0
    assert (history[-1].prefix_cache_queries, history[-1].prefix_cache_hits) == (27, 8)
    for name in ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"):
        values = [getattr(stats, name) for stats in history]
        assert values == sorted(values)
    assert history[-1].kv_cache_usage == history[-1].num_running == history[-1].num_waiting == 0


def test_no_prefix_cache_stats_when_it_is_off():
    core, _ = create_core(enable_prefix_caching=False)
    for _ in range(2):
        assert cached_tokens(core)[0] == 0
    assert core.scheduler.make_stats().prefix_cache_queries == 0


def test_reset_prefix_cache_waits_for_running_requests_or_preempts_them():
    core, _ = create_core(next_token=endless)
    requests = [create_request(9, max_tokens=6) for _ in range(3)]
    for request in requests:
        core.add_request(request)
    core.step()
    scheduler = core.scheduler
    assert not scheduler.reset_prefix_cache()
    assert len(scheduler.running) == 3
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert list(scheduler.schedule().req_ids) == [request.request_id for request in requests]


@pytest.mark.parametrize("budget", [3, 4, 64])
@pytest.mark.parametrize("length", [1, 2, 8, 9])
def test_prompt_logprobs_come_once_and_complete(length, budget):
    core, _ = create_core(max_num_batched_tokens=budget, next_token=endless)
    prompt = list(range(20, 20 + length))
    core.add_request(create_request(prompt))
    run_to_end(core)
    request = create_request(prompt, prompt_logprobs=2, logprobs=1)
    core.add_request(request)
    collected = run_to_end(core).requests[request.request_id]
    expected = generate_alone(request, core.scheduler, endless)
    assert collected.prompt_logprobs == expected.prompt_logprobs
    assert len(collected.prompt_logprobs) == length - 1
    assert len(collected.logprobs) == len(collected.token_ids) == 4
    assert collected.last.num_cached_tokens == 0
