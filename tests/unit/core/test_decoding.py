"""The short way for requests that decode makes the plans and outputs of the one rule."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict

import msgspec
import pytest

from helpers.core import FakeExecutor, create_request, create_scheduler
from tokenmill.core import scheduler as scheduler_module
from tokenmill.core.decoding import decodes_in_place
from tokenmill.core.request import Request
from tokenmill.engine.core import EngineCore


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
            logprobs=choose.choice([None, None, 2]),
            eos_token_id=choose.choice([None, 2]),
        )
        for index, name in enumerate(names)
    ]
    while waiting or core.has_requests():
        while waiting and choose.random() < 0.4:
            core.add_request(waiting.pop())
        if choose.random() < 0.03:
            executor.bad_tokens[choose.choice(names)] = -1
        if choose.random() < 0.03:
            core.abort_requests([choose.choice(names)])
        if core.has_requests():
            outputs.append(msgspec.to_builtins(core.step()))
    return [asdict(plan) for plan in executor.plans], outputs


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_plans_and_outputs_are_those_of_the_rule(
    seed: int, depth: int, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0
    in_place: Callable[[Request, int], bool] = decodes_in_place

    def counted(request: Request, num_lookahead_tokens: int) -> bool:
        nonlocal taken
        found = in_place(request, num_lookahead_tokens)
        taken += found
        return found

    monkeypatch.setattr(scheduler_module, "decodes_in_place", counted)
    short = run(seed, depth=depth, num_drafts=num_drafts)
    assert taken > 50 or num_drafts
    monkeypatch.setattr(scheduler_module, "decodes_in_place", lambda *parts: False)
    monkeypatch.setattr(scheduler_module, "got_its_token", lambda *parts: False)
    assert run(seed, depth=depth, num_drafts=num_drafts) == short
