"""A pooling request is one that ends at its prompt, with the result of its last step."""

from __future__ import annotations

import pytest

from helpers.core import create_request, create_scheduler
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.contracts.request import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PoolingRequest,
    TensorData,
)
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.core.scheduler import Scheduler
from tokenmill.errors import ContextLengthExceededError

RESULT = TensorData("float32", (1,), b"\0\0\0\0")


def pooling_request(prompt: int, **fields: object) -> EngineCoreRequest:
    request = create_request(prompt, max_tokens=1, **fields)
    request.pooling = PoolingRequest("embed", use_activation=True)
    return request


def settle(scheduler: Scheduler, plan: SchedulerOutput, *pooled: str) -> EngineCoreOutputs:
    result = ModelRunnerOutput(
        plan.step_id, plan.req_ids, [[] for _ in plan.rows], pooled=dict.fromkeys(pooled, RESULT)
    )
    return scheduler.update_from_output(plan, result)


def test_it_ends_with_the_step_that_has_computed_its_last_token() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(pooling_request(12, request_id="long"))
    scheduler.add_request(pooling_request(3, request_id="short"))
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == [8]
    assert settle(scheduler, plan).outputs == []
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == [4, 3]
    assert plan.is_sampled == [False, False]
    assert plan.num_logits == [0, 0]
    first, second = settle(scheduler, plan, "long", "short").outputs
    assert (first.request_id, second.request_id) == ("long", "short")
    for output in (first, second):
        assert output.finish_reason is FinishReason.STOP
        assert output.pooled == RESULT
        assert output.new_token_ids == []
    assert not scheduler.requests
    assert scheduler.kv.pool.num_used_blocks == 0


def test_its_prompt_may_fill_the_context() -> None:
    scheduler = create_scheduler(max_model_len=16)
    scheduler.add_request(pooling_request(16, request_id="whole"))
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == [16]
    assert settle(scheduler, plan, "whole").outputs[0].finished
    with pytest.raises(ContextLengthExceededError):
        scheduler.add_request(pooling_request(17))
    with pytest.raises(ContextLengthExceededError):
        scheduler.add_request(create_request(16))


def test_without_chunks_whole_prompts_share_a_step() -> None:
    scheduler = create_scheduler(
        max_num_batched_tokens=16, max_model_len=16, enable_chunked_prefill=False
    )
    for number, length in enumerate((10, 6, 9)):
        scheduler.add_request(pooling_request(length, request_id=str(number)))
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == [10, 6]
    settle(scheduler, plan, "0", "1")
    assert scheduler.schedule().num_scheduled_tokens == [9]


def test_it_finds_prefixes_unless_it_may_not() -> None:
    scheduler = create_scheduler()
    prompt = list(range(10, 30))
    for skips, hit in ((False, 0), (False, 16), (True, 0)):
        request = pooling_request(0)
        request.prompt_token_ids = prompt
        request.sampling_params = request.sampling_params.replace(skip_reading_prefix_cache=skips)
        scheduler.add_request(request)
        plan = scheduler.schedule()
        assert plan.num_scheduled_tokens == [20 - hit]
        (output,) = settle(scheduler, plan, request.request_id).outputs
        assert output.num_cached_tokens == hit


def test_one_that_fails_and_one_that_is_aborted_leave_nothing() -> None:
    scheduler = create_scheduler()
    scheduler.add_request(pooling_request(5, request_id="fails"))
    scheduler.add_request(pooling_request(5, request_id="leaves"))
    plan = scheduler.schedule()
    scheduler.abort_requests(["leaves"])
    result = ModelRunnerOutput(
        plan.step_id,
        plan.req_ids,
        [[], []],
        errors={"fails": "it broke"},
        pooled={"leaves": RESULT},
    )
    (output,) = scheduler.update_from_output(plan, result).outputs
    assert (output.request_id, output.error, output.pooled) == ("fails", "it broke", None)
    assert output.finish_reason is FinishReason.ERROR
    assert not scheduler.requests
