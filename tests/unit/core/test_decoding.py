"""The short way for requests that decode makes the plans and outputs of the one rule."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from helpers.core import create_request, create_scheduler
from helpers.fake_executor import FakeExecutor
from tokenmill.contracts.request import EngineCoreOutput
from tokenmill.core import scheduler as scheduler_module
from tokenmill.core.decoding import settle_token, steps_in_place
from tokenmill.core.request import Request
from tokenmill.core.step import Step
from tokenmill.engine.core import EngineCore

NUM_BUSY_SEEDS = 3
"""With these seeds requests arrive faster than they end."""


def run(seed: int, *, depth: int, num_drafts: int) -> tuple[list[object], list[object]]:
    """Plans and outputs of a random load on a small pool."""
    choose = random.Random(seed)
    scheduler = create_scheduler(
        max_num_seqs=6,
        max_num_batched_tokens=24,
        num_blocks=30,
        max_steps_in_flight=depth,
        num_speculative_tokens=num_drafts,
        clock=lambda: 0.0,
    )
    executor = FakeExecutor(num_drafts=num_drafts, max_slots=scheduler.kv.num_usable_tokens)
    core = EngineCore(scheduler, executor, max_steps_in_flight=depth)
    outputs: list[object] = []
    names = [f"r{index}" for index in range(24)]
    waiting = [
        create_request(
            [3 + (7 * index + 11 * at) % 900 for at in range(choose.randint(1, 30))],
            request_id=name,
            arrival_time=float(index),
            max_tokens=choose.choice([1, 2, 7, 30]),
            min_tokens=choose.choice([0, 0, 1]),
            prompt_logprobs=choose.choice([None, None, None, 1]),
            logprobs=choose.choice([None, None, 2]) if seed % 2 else None,
            eos_token_id=choose.choice([None, 2]),
        )
        for index, name in enumerate(names)
    ]
    while waiting or core.has_requests():
        while waiting and choose.random() < (0.4 if seed < NUM_BUSY_SEEDS else 0.05):
            core.add_request(waiting.pop())
        if choose.random() < 0.03:
            executor.bad_tokens[choose.choice(names)] = -1
        if choose.random() < 0.03:
            core.abort_requests([choose.choice(names)])
        if core.has_requests():
            outputs.append(msgspec.to_builtins(core.step()))
    for plan in executor.plans:  # told by the short way only, and checked by `FakeExecutor`
        plan.is_repeated = False
    return list(executor.plans), outputs


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_plans_and_outputs_are_those_of_the_rule(
    seed: int, depth: int, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = repeated = settled = 0
    repeat: Callable[[Step, int], Step] = Step.repeat

    def counted_steps(request: Request, num_lookahead_tokens: int) -> int:
        nonlocal taken
        num_steps = steps_in_place(request, num_lookahead_tokens)
        taken += num_steps > 0
        return num_steps

    def counted_repeat(step: Step, step_id: int) -> Step:
        nonlocal repeated
        repeated += 1
        return repeat(step, step_id)

    def counted_settle(*parts: Any) -> EngineCoreOutput | None:
        nonlocal settled
        output = settle_token(*parts)
        settled += output is not None
        return output

    with monkeypatch.context() as patch:
        patch.setattr(scheduler_module, "steps_in_place", counted_steps)
        patch.setattr(Step, "repeat", counted_repeat)
        patch.setattr(scheduler_module, "settle_token", counted_settle)
        short = run(seed, depth=depth, num_drafts=num_drafts)
    if not num_drafts:
        assert taken + repeated > 30
        assert settled > 30
        assert repeated > 10 or seed < NUM_BUSY_SEEDS
    monkeypatch.setattr(scheduler_module, "steps_in_place", lambda *parts: 0)
    monkeypatch.setattr(scheduler_module, "settle_token", lambda *parts: None)
    assert run(seed, depth=depth, num_drafts=num_drafts) == short
