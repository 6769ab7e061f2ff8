"""One plan in flight: order, chunks, stops, preemption, refusals."""

from __future__ import annotations

import pytest

from helpers.core import (
    add,
    check_idle,
    create_core,
    create_kv_cache_config,
    create_request,
    create_scheduler,
    planned,
    run_to_end,
    settle,
)
from helpers.fake_executor import EOS, VOCAB_SIZE, endless, generate_alone
from tokenmill.config.engine_config import (
    CacheConfig,
    EngineConfig,
    MemoryLedger,
    ModelConfig,
    SchedulerConfig,
)
from tokenmill.contracts.request import FinishReason
from tokenmill.core.build import build_scheduler
from tokenmill.errors import ConfigError, ContextLengthExceededError, InvalidRequestError

# ---- order and chunks ---------------------------------------------------------------------------


@pytest.mark.parametrize(("chunked", "expected"), [(False, {"a": 40}), (True, {"a": 40, "b": 24})])
def test_schedule_order(chunked, expected):
    """Without chunks a long request that does not fit holds up the short one behind it."""
    scheduler = create_scheduler(enable_chunked_prefill=chunked, max_model_len=64)
    sizes = {"a": 40, "b": 40, "c": 4}
    add(scheduler, *(create_request(size, request_id=name) for name, size in sizes.items()))
    assert planned(scheduler.schedule()) == expected


def test_running_chunks_continue_before_new_requests_start():
    scheduler = create_scheduler(max_num_batched_tokens=10)
    add(scheduler, create_request(18, request_id="a"), create_request(7, request_id="b"))
    plans = []
    for _ in range(4):
        plan = scheduler.schedule()
        plans.append((planned(plan), plan.num_logits, plan.is_sampled))
        settle(scheduler, plan)
    assert plans == [
        ({"a": 10}, [0], [False]),
        ({"a": 8, "b": 2}, [1, 0], [True, False]),
        ({"a": 1, "b": 5}, [1, 1], [True, True]),
        ({"a": 1, "b": 1}, [1, 1], [True, True]),
    ]


def test_long_prompts_leave_room_for_others():
    scheduler = create_scheduler(max_num_batched_tokens=10, long_prefill_token_threshold=4)
    add(scheduler, create_request(9, request_id="a"), create_request(9, request_id="b"))
    add(scheduler, create_request(3, request_id="c"))
    plan = scheduler.schedule()
    assert planned(plan) == {"a": 4, "b": 4, "c": 2}
    settle(scheduler, plan)
    assert planned(scheduler.schedule()) == {"a": 4, "b": 4, "c": 1}


def test_b084_decodes_come_before_a_prompt():
    scheduler = create_scheduler(max_num_batched_tokens=8)
    add(scheduler, create_request(4, request_id="a"))
    settle(scheduler, scheduler.schedule())
    add(scheduler, create_request(30, request_id="b"))
    assert planned(scheduler.schedule()) == {"a": 1, "b": 7}


def test_no_more_than_max_num_seqs_run_and_the_smallest_row_is_taken():
    scheduler = create_scheduler(max_num_seqs=2)
    add(scheduler, *(create_request(3, request_id=name, max_tokens=1) for name in "abc"))
    plan = scheduler.schedule()
    assert plan.rows == [0, 1]
    settle(scheduler, plan)
    plan = scheduler.schedule()
    assert (plan.req_ids, plan.rows, sorted(plan.finished_rows)) == (["c"], [0], [0, 1])
    settle(scheduler, plan)
    check_idle(scheduler)


def test_a_plan_carries_changes_only():
    scheduler = create_scheduler(block_size=4)
    add(scheduler, create_request(3, request_id="a", max_tokens=9))
    plan = scheduler.schedule()
    (new,) = plan.scheduled_new_reqs
    assert (new.req_id, new.row, new.block_ids, new.num_computed_tokens) == ("a", 0, ([1],), 0)
    assert plan.scheduled_cached_reqs.rows == []
    settle(scheduler, plan)
    changes = []
    for _ in range(6):
        plan = scheduler.schedule()
        assert plan.scheduled_new_reqs == []
        cached = plan.scheduled_cached_reqs
        changes.append(list(zip(cached.rows, cached.new_block_ids, strict=True)))
        settle(scheduler, plan)
    assert changes == [[], [(0, ([2],))], [], [], [], [(0, ([3],))]]


def test_an_empty_plan_keeps_freed_rows_for_the_next():
    scheduler = create_scheduler()
    add(scheduler, create_request(3, max_tokens=1))
    settle(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert (plan.req_ids, plan.finished_rows) == ([], [])
    add(scheduler, create_request(3))
    plan = scheduler.schedule()
    assert (plan.step_id, plan.finished_rows, plan.rows) == (1, [0], [0])


# ---- stops --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "limits", "kept", "reason", "stop_reason"),
    [
        ([5, EOS, 6], {}, [5, EOS], FinishReason.STOP, None),
        ([5, 7, 6], {"stop_token_ids": [7]}, [5, 7], FinishReason.STOP, 7),
        ([5, 6], {"max_tokens": 3}, [5, 6], FinishReason.LENGTH, None),
        ([5, EOS], {"max_tokens": 3}, [5, EOS], FinishReason.STOP, None),
        ([5, 7], {"max_tokens": 3, "stop_token_ids": [7]}, [5, 7], FinishReason.STOP, 7),
        ([EOS, 7, 6], {"stop_token_ids": [7], "min_tokens": 3}, [EOS, 7], FinishReason.STOP, 7),
        ([EOS, 7, EOS], {"min_tokens": 4}, [EOS, 7, EOS], FinishReason.STOP, None),
        ([7, EOS], {"stop_token_ids": [7], "min_tokens": 4}, [7, EOS], None, None),
        ([EOS, 5, 6], {"eos_token_id": None}, [EOS, 5, 6], None, None),
        ([5, 6, 8], {}, [5, 6, 8], None, None),
    ],
)
def test_stops_trim_what_comes_after(tokens, limits, kept, reason, stop_reason):
    """One token, then several at once (accepted drafts): those after the stop are dropped."""
    scheduler = create_scheduler(num_speculative_tokens=2)
    (data,) = add(scheduler, create_request(6, **{"max_tokens": 9, **limits}))
    name = data.request_id
    settle(scheduler, scheduler.schedule(), {name: [4]}, draft_token_ids={name: [1, 1]})
    output = settle(scheduler, scheduler.schedule(), {name: tokens}, logprobs={name: tokens})[name]
    assert output.new_token_ids == output.new_logprobs == kept
    assert (output.finish_reason, output.stop_reason) == (reason, stop_reason)
    assert bool(scheduler.requests) == (reason is None)
    if reason is not None:
        check_idle(scheduler)


def test_the_context_length_ends_a_request():
    core, _ = create_core(next_token=endless, max_model_len=16)
    request = create_request(10, max_tokens=100, min_tokens=50)
    core.add_request(request)
    collected = run_to_end(core).requests[request.request_id]
    assert len(collected.token_ids) == 6
    assert collected.last.finish_reason is FinishReason.LENGTH


def test_initial_output_counts_for_max_tokens_and_is_not_told_again():
    core, _ = create_core(next_token=endless)
    whole = create_request([3, 4, 5], max_tokens=6)
    expected = generate_alone(whole, core.scheduler, endless).token_ids
    resumed = create_request([3, 4, 5], max_tokens=6, initial_output_ids=expected[:4])
    core.add_request(resumed)
    assert run_to_end(core).requests[resumed.request_id].token_ids == expected[4:]


# ---- refusals and errors ------------------------------------------------------------------------


def test_b080_impossible_prompts_are_refused_with_numbers_and_a_tiny_one_is_served():
    core, _ = create_core(num_blocks=5, block_size=4, max_model_len=64)
    with pytest.raises(InvalidRequestError, match=r"17 tokens.*holds 16.*num_kv_blocks"):
        core.add_request(create_request(17))
    with pytest.raises(ContextLengthExceededError, match=r"64 tokens.*max_model_len=64.*63"):
        core.add_request(create_request(64))
    tiny = create_request(2)
    core.add_request(tiny)
    assert run_to_end(core).requests[tiny.request_id].last.finished


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_b080_a_request_that_outgrows_the_pool_ends_with_length(depth, num_drafts):
    core, _ = create_core(
        next_token=endless, num_blocks=5, num_drafts=num_drafts, max_steps_in_flight=depth
    )
    request = create_request(10, max_tokens=100)
    core.add_request(request)
    core.add_request(create_request(9, max_tokens=3))
    collected = run_to_end(core).requests[request.request_id]
    assert len(collected.token_ids) == 7  # 16 slots, and one more token sampled from the last
    assert collected.last.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"prompt": []}, "prompt has 0 tokens"),
        ({"max_tokens": 2, "initial_output_ids": [5, 6]}, "max_tokens=2: 2 tokens are generated"),
    ],
)
def test_requests_without_work_are_refused(kwargs, message):
    with pytest.raises(InvalidRequestError, match=message):
        create_scheduler().add_request(create_request(**kwargs))


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=64.*max_model_len=65"):
        create_scheduler(enable_chunked_prefill=False, max_model_len=65)
    with pytest.raises(ConfigError, match="max_num_seqs=0"):
        create_scheduler(max_num_seqs=0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("bad_token", [-1, VOCAB_SIZE])
def test_b045_a_bad_token_ends_one_request_with_an_error(depth, bad_token):
    core, executor = create_core(max_steps_in_flight=depth, next_token=endless)
    requests = [create_request(6, max_tokens=5) for _ in range(3)]
    for request in requests:
        core.add_request(request)
    executor.bad_tokens[requests[1].request_id] = bad_token
    collector = run_to_end(core)
    failed = collector.requests[requests[1].request_id]
    assert failed.last.finish_reason is FinishReason.ERROR
    assert str(bad_token) in failed.last.error
    assert str(VOCAB_SIZE) in failed.last.error
    assert failed.token_ids == []
    for request in (requests[0], requests[2]):
        collected = collector.requests[request.request_id]
        assert collected.token_ids == generate_alone(request, core.scheduler, endless).token_ids
    assert core.scheduler.make_stats().num_errors == 1


def test_a_failed_request_ends_alone_and_its_blocks_are_not_found_again():
    core, executor = create_core(next_token=endless)
    prompt = list(range(10, 20))
    failing, other = create_request(prompt), create_request(12)
    core.add_request(failing)
    core.add_request(other)
    core.step()
    executor.errors[failing.request_id] = "out of luck"
    collector = run_to_end(core)
    last = collector.requests[failing.request_id].last
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "out of luck")
    assert collector.requests[other.request_id].last.finish_reason is FinishReason.LENGTH
    again = create_request(prompt)
    core.add_request(again)
    assert run_to_end(core).requests[again.request_id].last.num_cached_tokens == 0


def test_a_result_without_its_tokens_is_an_error_of_that_request():
    scheduler = create_scheduler()
    (data,) = add(scheduler, create_request(6))
    output = settle(scheduler, scheduler.schedule(), {data.request_id: []})[data.request_id]
    assert "brought 0 tokens where 1 to 1 were due" in output.error
    check_idle(scheduler)


# ---- ends from outside --------------------------------------------------------------------------


def test_abort_of_waiting_running_and_unknown_requests():
    scheduler = create_scheduler(max_num_seqs=1)
    a, b = add(scheduler, create_request(6), create_request(6))
    settle(scheduler, scheduler.schedule())
    scheduler.abort_requests([b.request_id, a.request_id, a.request_id, "nobody"])
    check_idle(scheduler)
    assert not scheduler.has_requests()


def test_a_deadline_aborts_whether_it_waits_or_runs():
    now = [0.0]
    scheduler = create_scheduler(max_num_seqs=1, clock=lambda: now[0])
    a, b, c = add(
        scheduler,
        create_request(6, deadline=5.0),
        create_request(6, deadline=4.0),
        create_request(6, deadline=50.0),
    )
    settle(scheduler, scheduler.schedule())
    now[0] = 5.0
    plan = scheduler.schedule()
    assert plan.req_ids == [c.request_id]
    ended = scheduler.take_outputs().outputs
    assert [(output.request_id, output.finish_reason) for output in ended] == [
        (b.request_id, FinishReason.ABORT),
        (a.request_id, FinishReason.ABORT),
    ]
    assert scheduler.take_outputs().outputs == []


def test_times_and_counts_are_told():
    now = [3.5]
    scheduler = create_scheduler(clock=lambda: now[0])
    (data,) = add(scheduler, create_request(6))
    plan = scheduler.schedule()
    now[0] = 9.0
    output = settle(scheduler, plan)[data.request_id]
    assert (output.first_scheduled_time, output.num_preemptions) == (3.5, 0)


# ---- readiness ----------------------------------------------------------------------------------


class HoldBack:
    """Holds back the ids in `held`."""

    def __init__(self, *held):
        self.held = set(held)

    def begin_pass(self, running):
        """Nothing changes."""

    def wait_reason(self, request):
        return "grammar" if request.request_id in self.held else None


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_set_aside_keep_their_order_and_hold_up_nobody(policy):
    rule = HoldBack("a", "c")
    scheduler = create_scheduler(readiness_rules=[rule], policy=policy, max_num_seqs=3)
    add(scheduler, *(create_request(4, request_id=name) for name in "abcde"))
    plan = scheduler.schedule()
    assert plan.req_ids == ["b", "d", "e"]
    assert scheduler.requests["a"].wait_reason == "grammar"
    settle(scheduler, plan)
    rule.held.clear()
    scheduler.abort_requests(["b", "d", "e"])
    assert scheduler.schedule().req_ids == ["a", "c"]
    assert scheduler.requests["a"].wait_reason is None


@pytest.mark.parametrize("caching", [False, True])
def test_build_scheduler_takes_its_limits_from_the_engine_config(caching):
    model = ModelConfig("tiny", "/nowhere", "LlamaForCausalLM", {}, "float32", 64, vocab_size=100)
    limits = SchedulerConfig(4, 32, 64, 0, True, "priority", 1)
    cache = CacheConfig(block_size=4, num_blocks=20, enable_prefix_caching=caching, dtype="float32")
    config = EngineConfig(
        model=model,
        cache=cache,
        scheduler=limits,
        device="cpu",
        exact=True,
        quantization=None,
        attention_backend="auto",
        kernels="reference",
        graphs="replay",
        num_threads=1,
        max_logprobs=20,
        seed=0,
        ledger=MemoryLedger(available=0, weights=0, workspace=0, reserve=0, kv_pool=0, kv_tokens=0),
    )
    scheduler = build_scheduler(config, create_kv_cache_config(20))
    prompt = list(range(3, 12))
    outputs = []
    for token_id in (99, 100):
        (data,) = add(scheduler, create_request(prompt, max_tokens=1))
        outputs.append(settle(scheduler, scheduler.schedule(), {data.request_id: [token_id]}))
    (first,), (second,) = (output.values() for output in outputs)
    assert (first.new_token_ids, first.num_cached_tokens) == ([99], 0)
    assert "vocabulary of 100" in second.error
    assert second.num_cached_tokens == (8 if caching else 0)
