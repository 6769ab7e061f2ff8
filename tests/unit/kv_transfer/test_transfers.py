"""The scheduler with KV outside the pool: late, incomplete, or never there."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helpers.core import (
    Collector,
    check_idle,
    check_invariants,
    create_core,
    create_request,
    run_to_end,
)
from helpers.fake_executor import BLOCK_SIZE, endless, generate_alone
from helpers.kv_transfer import FakeTransfer
from tokenmill.contracts.kv_transfer import Transferred
from tokenmill.contracts.request import FinishReason
from tokenmill.core.kv.transfers import WAIT_REASON

PROMPT = list(range(10, 10 + 6 * BLOCK_SIZE + 1))
OTHERS = [list(range(100 * i, 100 * i + 6 * BLOCK_SIZE)) for i in range(2, 5)]


def make(transfer=None, **settings):
    """A core on a fake device, and what is outside its pool."""
    transfer = transfer or FakeTransfer()
    core, executor = create_core(kv_transfer=transfer, next_token=endless, **settings)
    transfer.executor = executor
    return core, transfer


def run(core, *requests):
    for request in requests:
        core.add_request(request)
    return run_to_end(core).requests


def forget(core):
    """Evict everything from the pool."""
    assert core.scheduler.reset_prefix_cache()


def ask(prompt=PROMPT, **fields):
    return create_request(prompt, eos_token_id=None, **fields)


# ---- saving and loading -------------------------------------------------------------------------


def test_what_was_evicted_is_loaded_and_not_computed_again() -> None:
    core, transfer = make()
    first = run(core, request := ask())[request.request_id]
    assert transfer.num_saved == 7  # six of the prompt, and one that the output has filled
    forget(core)
    again = run(core, request := ask())[request.request_id]
    assert again.token_ids == first.token_ids
    assert again.last.num_cached_tokens == 6 * BLOCK_SIZE
    stats = core.scheduler.make_stats()
    assert stats.external_prefix_cache_hits == 6 * BLOCK_SIZE
    assert stats.prefix_cache_hits == 0, "it was not in the pool"
    assert stats.external_prefix_cache_queries == 2 * len(PROMPT)


def test_only_what_the_pool_lacks_is_loaded() -> None:
    core, transfer = make()
    run(core, ask())
    forget(core)
    run(core, ask(PROMPT[: 2 * BLOCK_SIZE + 1]))
    loaded = transfer.num_loaded
    result = run(core, request := ask())[request.request_id]
    assert loaded == 2
    assert transfer.num_loaded == 6
    assert result.last.num_cached_tokens == 6 * BLOCK_SIZE
    assert core.scheduler.make_stats().prefix_cache_hits == 2 * BLOCK_SIZE


@pytest.mark.parametrize("windows", [[None, 9], [9, 5], [None, None]])
def test_groups_load_what_their_windows_need(windows) -> None:
    core, transfer = make(windows=windows)
    first = run(core, request := ask())[request.request_id]
    forget(core)
    again = run(core, request := ask())[request.request_id]
    assert again.token_ids == first.token_ids
    assert again.last.num_cached_tokens == 6 * BLOCK_SIZE
    needed = {None: 6, 9: 2, 5: 1}
    assert transfer.num_loaded == sum(needed[window] for window in windows)


def test_a_gap_in_a_window_ends_the_prefix_before_it() -> None:
    core, transfer = make(windows=[None, 9])
    run(core, ask())
    forget(core)
    gap = [key for key in transfer.kept if key[-4:] == b"\1\0\0\0"]
    request = ask()
    core.add_request(request)
    hashes = core.scheduler.requests[request.request_id].block_hashes
    core.scheduler.kv.get_computed_blocks(core.scheduler.requests[request.request_id])
    del transfer.kept[hashes[4] + b"\1\0\0\0"]
    assert len(gap) == 7
    result = run_to_end(core).requests[request.request_id]
    assert result.last.num_cached_tokens == 4 * BLOCK_SIZE


def test_a_waiting_request_holds_up_nobody() -> None:
    core, transfer = make()
    run(core, ask())
    forget(core)
    transfer.is_stuck = True
    late, other = ask(), ask(OTHERS[0])
    core.add_request(late)
    core.add_request(other)
    collector = Collector()
    while not (done := collector.requests.get(other.request_id)) or not done.last.finished:
        collector.add(core.step().outputs)
        check_invariants(core.scheduler)
    waiting = core.scheduler.requests[late.request_id]
    assert waiting.wait_reason == WAIT_REASON
    transfer.is_stuck = False
    assert run_to_end(core).requests[late.request_id].last.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("policy", [False, True])
def test_what_does_not_come_is_computed_or_ends_its_request(policy) -> None:
    core, transfer = make(FakeTransfer(fails_requests=policy))
    first = run(core, request := ask())[request.request_id]
    forget(core)
    transfer.loss = 1.0
    again = run(core, request := ask())[request.request_id]
    if policy:
        assert again.last.finish_reason is FinishReason.ERROR
        assert "could not be loaded" in again.last.error
    else:
        assert again.token_ids == first.token_ids
        assert again.last.num_cached_tokens == 0


def test_the_blocks_before_a_missing_one_are_used() -> None:
    core, transfer = make()
    run(core, ask())
    forget(core)
    request = ask()
    core.add_request(request)
    transfer.is_stuck = True
    core.step()
    (job,) = transfer.loads
    del transfer.kept[job.blocks[3].key]
    transfer.is_stuck = False
    result = run_to_end(core).requests[request.request_id]
    assert result.last.num_cached_tokens == 3 * BLOCK_SIZE


def test_hits_stay_while_the_rest_is_loaded() -> None:
    core, transfer = make(num_blocks=16)
    run(core, ask())
    forget(core)
    run(core, ask(PROMPT[:9]))
    transfer.is_stuck = True
    core.add_request(late := ask())
    core.step()
    assert core.scheduler.kv.pool.num_used_blocks == 6, "two hits, and four to be filled"
    run_until_done(core, ask(OTHERS[0], max_tokens=10))  # takes all that is free
    transfer.is_stuck = False
    result = run_to_end(core).requests[late.request_id]
    assert result.last.num_cached_tokens == 6 * BLOCK_SIZE
    assert transfer.num_loaded == 6


def test_requests_that_begin_alike_wait_for_one_load() -> None:
    core, transfer = make(FakeTransfer(max_delay=5))
    run(core, ask(), ask(OTHERS[0]))
    forget(core)
    before = core.scheduler.make_stats()
    longer = PROMPT[: 4 * BLOCK_SIZE] + OTHERS[0]
    requests = [ask(), ask(), ask(longer), ask(PROMPT[:9])]
    results = run(core, *requests)
    assert transfer.num_loaded == 6
    cached = [results[each.request_id].last.num_cached_tokens for each in requests]
    assert cached == [6 * BLOCK_SIZE, 6 * BLOCK_SIZE, 4 * BLOCK_SIZE, 2 * BLOCK_SIZE]
    stats = core.scheduler.make_stats()
    num_queried = stats.external_prefix_cache_queries - before.external_prefix_cache_queries
    # Once each: all of the first, and of the others what the pool did not have by then.
    assert num_queried == len(PROMPT) + 1 + (len(longer) - 4 * BLOCK_SIZE) + 1
    assert stats.external_prefix_cache_hits == 6 * BLOCK_SIZE


def test_a_request_that_may_not_read_the_cache_loads_nothing() -> None:
    core, transfer = make()
    run(core, ask())
    forget(core)
    run(core, ask(prompt_logprobs=0))
    assert transfer.num_loaded == 0


def test_salts_and_adapters_are_part_of_what_is_found() -> None:
    core, transfer = make()
    run(core, ask(cache_salt="a"))
    forget(core)
    run(core, ask(cache_salt="b"))
    run(core, ask())
    assert transfer.num_loaded == 0
    forget(core)
    run(core, ask(cache_salt="a"))
    assert transfer.num_loaded == 6


# ---- requests that end early --------------------------------------------------------------------


@pytest.mark.parametrize("when", ["abort", "deadline"])
def test_what_was_under_way_serves_the_next_one(when) -> None:
    now = 0.0
    core, transfer = make(clock=lambda: now)
    run(core, ask())
    forget(core)
    transfer.is_stuck = True
    request = ask(deadline=5.0 if when == "deadline" else None)
    core.add_request(request)
    core.step()
    assert core.scheduler.requests[request.request_id].wait_reason == WAIT_REASON
    assert core.scheduler.kv.pool.num_used_blocks == 6
    now = 6.0
    if when == "abort":
        core.abort_requests([request.request_id])
    core.step()
    assert not core.scheduler.requests
    assert core.scheduler.kv.pool.num_used_blocks == 6, "they are still being written"
    transfer.is_stuck = False
    result = run(core, request := ask())[request.request_id]
    assert result.last.num_cached_tokens == 6 * BLOCK_SIZE
    assert transfer.num_loaded == 6, "loaded once"


def test_a_preempted_request_finds_its_blocks_again() -> None:
    core, transfer = make(num_blocks=16, max_num_seqs=2)
    requests = [ask(each, max_tokens=20) for each in OTHERS[:2]]
    results = run(core, *requests)
    assert core.scheduler.make_stats().num_preemptions > 0
    for request in requests:
        expected = generate_alone(request, core.scheduler, endless)
        assert results[request.request_id].token_ids == expected.token_ids
    assert transfer.num_saved > 0


def test_a_preempted_request_looks_outside_again() -> None:
    core, transfer = make()
    core.add_request(request := ask(max_tokens=9))
    collector = Collector()
    for _ in range(5):
        collector.add(core.step().outputs)
    assert transfer.num_loaded == 0
    assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
    while core.has_requests():
        collector.add(core.step().outputs)
    assert transfer.num_loaded == 7, "six blocks of the prompt, and one of the output"
    expected = generate_alone(request, core.scheduler, endless)
    assert collector.requests[request.request_id].token_ids == expected.token_ids


class FullDisk(FakeTransfer):
    def _end_save(self, job):
        self.num_saved += len(job.blocks)
        return Transferred(job.job_id, error="the disk is full")


def test_failed_saves_are_not_repeated_for_ever() -> None:
    core, transfer = make(FullDisk())
    run(core, ask())
    assert transfer.num_saved == 7
    assert not transfer.kept


def test_a_full_disk_does_not_fill_the_log(caplog) -> None:
    core, transfer = make(FullDisk())
    for prompt in (PROMPT, *OTHERS):
        run(core, ask(prompt))
    assert transfer.num_saved > 20
    assert [each.message for each in caplog.records if "the disk is full" in each.message] == [
        "KV transfer: blocks are not kept: the disk is full"
    ]


def test_without_a_place_nothing_is_saved() -> None:
    core, transfer = make(FakeTransfer(keeps_blocks=False))
    run(core, ask())
    assert transfer.num_saved == 0


def test_blocks_wait_for_steps_in_flight_before_they_are_written() -> None:
    """With two steps in flight, a block that one of them writes may be given to a load."""
    core, transfer = make(max_steps_in_flight=2, num_blocks=40)
    run(core, ask())
    forget(core)
    core.add_request(ask(OTHERS[0], max_tokens=30))
    for _ in range(3):
        core.step()
    core.add_request(ask())
    starts = []
    load = transfer.load
    transfer.load = lambda *given: (starts.append(core._transfers._num_settled), load(*given))
    fence = core._transfers._num_submitted
    run_to_end(core)
    assert starts == [fence]


def test_shutdown_saves_what_is_left() -> None:
    core, transfer = make()
    core.add_request(ask())
    while core.scheduler.requests:
        core.step()
    core.shutdown()
    core.shutdown()
    assert transfer.num_saved == 7
    assert transfer.num_shutdowns == 1


# ---- from engine to engine ----------------------------------------------------------------------


def prefill(core, prompt=PROMPT):
    request = ask(prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    result = run_until_done(core, request)
    return request, result.last.kv_transfer_params, result.token_ids


def run_until_done(core, request):
    core.add_request(request)
    collector = Collector()
    for _ in range(1000):
        collector.add(core.step().outputs)
        check_invariants(core.scheduler)
        done = collector.requests.get(request.request_id)
        if done is not None and done.last is not None and done.last.finished:
            return done
    raise AssertionError("it does not end")


@pytest.mark.parametrize("windows", [[None], [None, 9]])
def test_a_prompt_computed_elsewhere_is_not_computed_again(windows) -> None:
    first, giver = make(FakeTransfer(keeps_blocks=False), windows=windows)
    _, params, token_ids = prefill(first)
    assert first.holds_blocks
    ids = params["remote_block_ids"]
    by_group = ids if len(windows) > 1 else [ids]
    assert [len(each) for each in by_group] == [6] * len(windows), "null blocks among them"
    assert first.scheduler.kv.pool.num_used_blocks == (8 if 9 in windows else 6)

    second, taker = make(FakeTransfer(keeps_blocks=False), windows=windows)
    taker.remote = giver.remote
    request = ask(kv_transfer_params=params)
    result = run(second, request)[request.request_id]
    assert result.last.num_cached_tokens == 6 * BLOCK_SIZE
    assert result.token_ids[:1] == token_ids
    assert result.token_ids == generate_alone(request, second.scheduler, endless).token_ids

    giver.fetched(*giver.held)
    run_to_end(first)
    assert not first.holds_blocks


def test_held_blocks_are_not_handed_out() -> None:
    core, giver = make(FakeTransfer(keeps_blocks=False), num_blocks=14)
    prefill(core)
    for each in OTHERS:
        result = run_until_done(core, request := ask(each[:20]))
        assert result.token_ids == generate_alone(request, core.scheduler, endless).token_ids
    assert core.scheduler.kv.pool.num_used_blocks == 6
    giver.fetched(*giver.held)
    run_to_end(core)


def test_whoever_waits_for_held_blocks_sleeps(monkeypatch) -> None:
    core, giver = make(FakeTransfer(keeps_blocks=False), num_blocks=14)
    prefill(core)

    def fetched_meanwhile(seconds: float) -> None:
        assert seconds > 0
        giver.fetched(*giver.held)

    monkeypatch.setattr(giver, "wait", fetched_meanwhile)
    larger = [id_ for other in OTHERS for id_ in other][: 8 * BLOCK_SIZE]
    result = run_until_done(core, request := ask(larger, max_tokens=2))
    assert result.token_ids == generate_alone(request, core.scheduler, endless).token_ids
    run_to_end(core)


def test_others_never_hold_the_whole_pool() -> None:
    core, giver = make(FakeTransfer(keeps_blocks=False), num_blocks=14)
    assert len(prefill(core)[1]["remote_block_ids"]) == 6
    assert prefill(core, OTHERS[0])[1]["remote_block_ids"] == [], "12 of 13 blocks"
    assert len(prefill(core, OTHERS[1][:9])[1]["remote_block_ids"]) == 2
    for job_id in list(giver.held):
        giver.fetched(job_id)
    run_to_end(core)


def test_a_prompt_of_less_than_a_block_is_told_as_well() -> None:
    core, giver = make(FakeTransfer(keeps_blocks=False))
    _, params, _ = prefill(core, PROMPT[: BLOCK_SIZE - 1])
    assert params["remote_block_ids"] == []
    giver.fetched(*giver.held)
    run_to_end(core)


def test_another_prompt_gets_nothing_of_what_is_held() -> None:
    """Blocks go by the hash of their tokens: whoever names another's KV computes its own."""
    first, giver = make(FakeTransfer(keeps_blocks=False))
    _, params, _ = prefill(first)
    second, taker = make(FakeTransfer(keeps_blocks=False))
    taker.remote = giver.remote
    request = ask(OTHERS[0], kv_transfer_params=params)
    result = run(second, request)[request.request_id]
    assert taker.num_loaded == 0
    assert result.token_ids == generate_alone(request, second.scheduler, endless).token_ids


def test_whoever_needs_nothing_says_so() -> None:
    first, giver = make(FakeTransfer(keeps_blocks=False))
    sender, params, _ = prefill(first)
    second, taker = make(FakeTransfer(keeps_blocks=False))
    run(second, ask())  # now its own pool has the prefix
    run(second, ask(kv_transfer_params=params))
    aborted = ask(kv_transfer_params=params)
    second.add_request(aborted)
    second.abort_requests([aborted.request_id])
    assert taker.released == [sender.request_id] * 2
    assert taker.num_loaded == 0
    giver.fetched(*giver.held)
    run_to_end(first)


def test_whoever_leaves_while_another_loads_the_same_says_so() -> None:
    first, giver = make(FakeTransfer(keeps_blocks=False))
    _, params, _ = prefill(first)
    sender, others, _ = prefill(first)
    second, taker = make(FakeTransfer(keeps_blocks=False, remote=giver.remote))
    taker.is_stuck = True
    loading, waiting = ask(kv_transfer_params=params), ask(kv_transfer_params=others)
    second.add_request(loading)
    second.add_request(waiting)
    second.step()
    assert len(taker.loads) == 1
    second.abort_requests([waiting.request_id])
    assert taker.released == [sender.request_id]
    taker.is_stuck = False
    run_to_end(second)
    for job_id in list(giver.held):
        giver.fetched(job_id)
    run_to_end(first)


def test_an_aborted_prompt_is_not_held() -> None:
    core, giver = make(FakeTransfer(keeps_blocks=False))
    request = ask(max_tokens=5, kv_transfer_params={"do_remote_decode": True})
    core.add_request(request)
    core.step()
    core.abort_requests([request.request_id])
    run_to_end(core)
    assert not giver.held


# ---- everything at once -------------------------------------------------------------------------


@st.composite
def limits(draw):
    return {
        "num_blocks": draw(st.sampled_from([14, 18, 30, 60])),
        "max_num_seqs": draw(st.sampled_from([1, 2, 5])),
        "max_num_batched_tokens": draw(st.sampled_from([5, 16, 64])),
        "max_model_len": 48,
        "max_steps_in_flight": draw(st.sampled_from([1, 2])),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "windows": draw(st.sampled_from([[None], [None, 7]])),
        "num_drafts": draw(st.sampled_from([0, 2])),
    }


@settings(max_examples=50, deadline=None, phases=[Phase.generate])
@given(
    limits=limits(),
    seed=st.integers(0, 2**32),
    delay=st.sampled_from([0, 3, 20]),
    loss=st.sampled_from([0.0, 0.3]),
    keeps=st.booleans(),
)
def test_whatever_happens_everybody_gets_the_tokens_they_get_alone(
    limits, seed, delay, loss, keeps
) -> None:
    rng = random.Random(seed)
    transfer = FakeTransfer(random=rng, max_delay=delay, loss=loss, keeps_blocks=keeps)
    now = 0.0
    core, transfer = make(transfer, clock=lambda: now, **limits)
    collector, requests, aborted, params = Collector(), {}, set(), []
    for _ in range(rng.randint(20, 80)):
        now += 1.0
        action = rng.random()
        if action < 0.3 and len(requests) < 25:
            request = random_request(rng, params, now)
            requests[request.request_id] = request
            core.add_request(request)
        elif action < 0.35 and requests:
            aborted.add(chosen := rng.choice(list(requests)))
            core.abort_requests([chosen])
        elif action < 0.4 and transfer.held:
            transfer.fetched(rng.choice(list(transfer.held)))
        elif action < 0.42:
            transfer.is_stuck = False
            core.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        transfer.is_stuck = rng.random() < 0.3
        outputs = core.step().outputs
        collector.add(outputs)
        params += [each.kv_transfer_params for each in outputs if each.kv_transfer_params]
        check_invariants(core.scheduler)
    transfer.is_stuck = False
    drain(core, transfer, collector)
    for request_id, request in requests.items():
        if request_id not in aborted:
            if collector.requests[request_id].last.finish_reason is FinishReason.ABORT:
                assert request.deadline is not None
                continue
            expected = generate_alone(request, core.scheduler, endless)
            assert collector.requests[request_id].token_ids == expected.token_ids


def random_request(rng, params, now):
    prompt = rng.choice([PROMPT, *OTHERS])[: rng.randint(1, 6 * BLOCK_SIZE)]
    kv_transfer_params = {}
    if rng.random() < 0.2:
        kv_transfer_params = {"do_remote_decode": True}
    elif params and rng.random() < 0.5:
        kv_transfer_params = rng.choice(params)
    return ask(
        prompt,
        max_tokens=rng.randint(1, 12),
        priority=rng.randint(0, 2),
        prompt_logprobs=0 if rng.random() < 0.1 else None,
        cache_salt=rng.choice([None, None, "salt"]),
        deadline=now + rng.randint(1, 20) if rng.random() < 0.1 else None,
        kv_transfer_params=kv_transfer_params,
    )


def drain(core, transfer, collector):
    for _ in range(5000):
        for job_id in list(transfer.held):
            transfer.fetched(job_id)
        if not core.has_requests():
            break
        collector.add(core.step().outputs)
        check_invariants(core.scheduler)
    check_idle(core.scheduler)
