"""A simulated engine makes the plans that a real one makes, for the same requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from helpers.simulated import FixedCost, Listed
from helpers.tiny import tiny_llama
from tokenmill.entrypoints.bench.recorder import EngineParts
from tokenmill.entrypoints.llm import LLM
from tokenmill.sampling_params import RequestOutputKind, SamplingParams
from tokenmill.simulate.model import cache_of
from tokenmill.simulate.recorder import Recorder
from tokenmill.simulate.requests import SimulatedRequest
from tokenmill.simulate.routing import RoundRobin
from tokenmill.simulate.simulation import Simulation
from tokenmill.simulate.worker import SimulatedWorker


@dataclass
class Plans:
    """Tokens of each request in each step, and what was found in the cache; a journal, too."""

    names: dict[str, str] = field(default_factory=dict)
    """Of requests whose ids say nothing, by id."""
    steps: list[dict[str, int]] = field(default_factory=list)
    found: list[tuple[str, int]] = field(default_factory=list)

    def begin(self, plan):
        ids = [self.names.get(request_id, request_id) for request_id in plan.req_ids]
        self.steps.append(dict(zip(ids, plan.num_scheduled_tokens, strict=True)))
        for new in plan.scheduled_new_reqs:
            name = self.names.get(new.req_id, new.req_id)
            self.found.append((name, new.num_computed_tokens))

    def end(self, plan):
        """It makes no difference."""


def load(seed, policy):
    """(Step before which it comes, prompt, tokens to generate, priority), without a pause; one
    request for the first step.
    """
    draw = random.Random(seed)
    shared = [[draw.randrange(3, 200) for _ in range(20)] for _ in range(2)]
    requests, step = [], 0
    for _ in range(20):
        own = [draw.randrange(3, 200) for _ in range(draw.randrange(1, 50))]
        prompt = draw.choice([*shared, []]) + own
        priority = draw.randrange(3) if policy == "priority" else 0
        requests.append((step, prompt, draw.randrange(1, 40), priority))
        step += draw.randrange(4) if step else 1
    return requests


def real_plans(llm, requests):
    """Of an engine that is stepped; requests come between steps."""
    plans, parts = Plans(), EngineParts.of(llm)
    parts.core.journal = plans
    waiting, step = list(requests), 0
    while waiting or llm.llm_engine.has_unfinished_requests():
        while waiting and waiting[0][0] <= step:
            _, prompt, max_tokens, priority = waiting.pop(0)
            number = len(requests) - len(waiting) - 1
            params = SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
            )
            llm.llm_engine.add_request(
                str(number), {"prompt_token_ids": prompt}, params, priority=priority
            )
            plans.names[next(reversed(parts.core.scheduler.requests))] = str(number)
        llm.llm_engine.step()
        step += 1
    return plans, parts.core.scheduler.make_stats()


def simulated_plans(config, cache, requests):
    """Of steps of a second each; requests that come before a step come in the second before."""
    plans, recorder = Plans(), Recorder()
    worker = SimulatedWorker(config, cache, FixedCost(1.0), recorder)
    worker.on_plan = plans.begin
    arriving = [
        SimulatedRequest(number, step and step - 0.5 + 0.01 * number, prompt, max_tokens, priority)
        for number, (step, prompt, max_tokens, priority) in enumerate(requests)
    ]
    Simulation([worker], RoundRobin(), Listed(*arriving), recorder).run()
    assert recorder.num_completed == len(requests)
    return plans, worker.scheduler.make_stats()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_plans_are_the_same(policy, async_scheduling):
    requests = load(7, policy)
    with LLM(
        str(tiny_llama()),
        device="cpu",
        dtype="float32",
        num_threads=1,
        num_kv_blocks=24,
        block_size=8,
        max_model_len=128,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        scheduling_policy=policy,
        async_scheduling=async_scheduling,
    ) as llm:
        config, parts = llm.llm_engine.config, EngineParts.of(llm)
        cache = parts.worker.kv_cache_config
        real, real_stats = real_plans(llm, requests)
    simulated, simulated_stats = simulated_plans(config, cache, requests)
    assert simulated.steps == real.steps
    assert simulated.found == real.found
    assert simulated_stats == real_stats
    assert real_stats.num_preemptions > 0
    assert real_stats.prefix_cache_hits > 0
    assert any(len(step) > 1 and max(step.values()) > 1 for step in real.steps)


def test_the_pool_is_known_without_the_model():
    with LLM(str(tiny_llama()), device="cpu", dtype="float32", num_kv_blocks=24) as llm:
        real = EngineParts.of(llm).worker.kv_cache_config
        found = cache_of(llm.llm_engine.config)
    assert (found.num_blocks, found.block_size) == (real.num_blocks, real.block_size)
    assert [group.spec for group in found.groups] == [group.spec for group in real.groups]
    assert [len(each.layer_names) for each in found.groups] == [
        len(each.layer_names) for each in real.groups
    ]
