"""Steps of a pipeline share the requests, and none has a request whose last token is not known."""

from __future__ import annotations

import random
from collections import deque

import pytest

from helpers.core import (
    Collector,
    check_idle,
    check_invariants,
    create_core,
    create_request,
    run_to_end,
)
from helpers.fake_executor import FakeExecutor, generate_alone
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.core.micro_batches import next_micro_batch
from tokenmill.engine.core import EngineCore


def create(num_stages: int, **settings: object) -> tuple[EngineCore, FakeExecutor]:
    return create_core(num_stages=num_stages, max_steps_in_flight=num_stages, **settings)


def sampled(plan: SchedulerOutput) -> set[str]:
    return {
        req_id for req_id, samples in zip(plan.req_ids, plan.is_sampled, strict=True) if samples
    }


@pytest.mark.parametrize("num_stages", [2, 3])
def test_requests_that_decode_are_divided_among_the_steps_in_flight(num_stages: int) -> None:
    core, executor = create(num_stages)
    for _ in range(6):
        core.add_request(create_request(4, max_tokens=12, eos_token_id=None))
    run_to_end(core)
    batches = [len(plan.req_ids) for plan in executor.plans]
    in_the_middle = batches[2 * num_stages : -2 * num_stages]
    assert in_the_middle
    assert set(in_the_middle) == {6 // num_stages}
    assert not any(plan.is_repeated for plan in executor.plans)


@pytest.mark.parametrize("seed", range(6))
def test_no_request_is_in_two_steps_that_sample_it(seed: int) -> None:
    """Under random loads, with preemption and prompts in pieces; the tokens are those that each
    request has alone.
    """
    dice = random.Random(seed)
    num_stages = dice.choice([2, 3, 4])
    core, executor = create(num_stages, num_blocks=24, max_num_batched_tokens=17, max_num_seqs=6)
    requests = [
        create_request(dice.randint(1, 40), max_tokens=dice.randint(1, 20)) for _ in range(14)
    ]
    expected = {
        request.request_id: generate_alone(request, core.scheduler).token_ids
        for request in requests
    }
    collector, waiting = Collector(), deque(requests)
    while waiting or core.has_requests():
        for _ in range(min(dice.randint(0, 3), len(waiting))):
            core.add_request(waiting.popleft())
        collector.add(core.step().outputs)
        check_invariants(core.scheduler)
        in_flight = [sampled(plan) for plan, _ in core._in_flight]
        assert sum(map(len, in_flight)) == len(set().union(*in_flight))
    check_idle(core.scheduler)
    assert {name: each.token_ids for name, each in collector.requests.items()} == expected
    assert max(len(plan.req_ids) for plan in executor.plans) > 1


def test_a_long_prompt_goes_on_in_the_next_step_without_waiting() -> None:
    core, executor = create(2, max_num_batched_tokens=16)
    core.add_request(create_request(64, max_tokens=2))
    core.step()
    assert [plan.num_scheduled_tokens for plan in executor.plans] == [[16], [16]]
    run_to_end(core)


def test_with_one_stage_nothing_changes() -> None:
    running = [object(), object()]
    assert next_micro_batch(running, num_stages=1) is running  # type: ignore[arg-type, comparison-overlap]
    core, _ = create_core(max_steps_in_flight=2)
    core.add_request(create_request(4, max_tokens=5))
    run_to_end(core)
