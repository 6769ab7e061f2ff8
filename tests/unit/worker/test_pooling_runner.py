"""The runner of models that pool, on a model whose hidden states are checksums of prefixes."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
import torch

from helpers.worker import ERROR_TOKEN, LAYER, VOCAB_SIZE, Host, ToyBuilder, ToyModel, make_worker
from tokenmill.config.engine_config import PoolingConfig
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.contracts.request import PoolingRequest
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.worker.attention_groups import AttentionGroup
from tokenmill.worker.limits import RunnerLimits
from tokenmill.worker.pooling.pooler import Pooler
from tokenmill.worker.pooling.runner import PoolingRunner
from tokenmill.worker.pooling.states import MeanOfTokens
from tokenmill.worker.worker import Worker

PROMPTS = {"a": [5, 6, 7, 8, 9], "b": [11], "c": [5, 6, 7, 30]}


class PoolingHost(Host):
    """Makes plans without samples."""

    def plan(self, num_tokens: Any, **kwargs: Any) -> SchedulerOutput:
        plan = super().plan(num_tokens, **kwargs)
        plan.is_sampled = [False] * len(plan.rows)
        plan.num_logits = [0] * len(plan.rows)
        return plan

    def add_pooling(self, req_id: str, prompt: list[int], task: str = "embed") -> None:
        self.add(req_id, prompt)
        self.requests[req_id].data.pooling = PoolingRequest(task, use_activation=False)


def pooling_host(pooling_type: str) -> PoolingHost:
    model = ToyModel(200, 4)
    config = PoolingConfig(
        tasks=("embed", "token_embed"),
        pooling_type=pooling_type,
        is_causal=True,
        use_activation=True,
        activation="normalize",
        size=1,
    )
    runner = PoolingRunner(
        model,
        [AttentionGroup(0, (LAYER,), ToyBuilder())],
        RunnerLimits(8, 4096, 256, 4, VOCAB_SIZE),
        Pooler(config, model),
    )
    return PoolingHost(Worker(runner, make_worker()[0].kv_cache_config))


def states_of(prompt: list[int]) -> list[int]:
    prefixes = (np.array(prompt[: i + 1], np.int64) for i in range(len(prompt)))
    return [zlib.crc32(prefix.tobytes()) for prefix in prefixes]


def expected(prompt: list[int], pooling_type: str) -> float:
    states = states_of(prompt)
    return {"last": states[-1], "cls": states[0], "mean": np.mean(states)}[pooling_type]


def value(output: ModelRunnerOutput, req_id: str) -> Any:
    data = output.pooled[req_id]
    return np.frombuffer(data.data, "<f4").reshape(data.shape)


@pytest.mark.parametrize("pooling_type", ["last", "cls", "mean"])
def test_prompts_in_one_step(pooling_type: str) -> None:
    host = pooling_host(pooling_type)
    for req_id, prompt in PROMPTS.items():
        host.add_pooling(req_id, prompt)
    output = host.step()
    assert output.sampled_token_ids == [[], [], []]
    for req_id, prompt in PROMPTS.items():
        assert value(output, req_id) == np.float32(expected(prompt, pooling_type))


@pytest.mark.parametrize("pooling_type", ["last", "cls", "mean"])
def test_prompts_in_pieces(pooling_type: str) -> None:
    host = pooling_host(pooling_type)
    for req_id, prompt in PROMPTS.items():
        host.add_pooling(req_id, prompt)
    first = host.step({"a": 2, "c": 3})
    assert first.pooled == {}
    second = host.step({"a": 1, "b": 1, "c": 1})
    assert sorted(second.pooled) == ["b", "c"]
    last = host.step({"a": 2})
    for output, req_id in ((second, "b"), (second, "c"), (last, "a")):
        assert value(output, req_id) == np.float32(expected(PROMPTS[req_id], pooling_type))


@pytest.mark.parametrize("pooling_type", ["last", "cls", "mean"])
def test_a_preempted_prompt_starts_over(pooling_type: str) -> None:
    host = pooling_host(pooling_type)
    host.add_pooling("a", PROMPTS["a"])
    host.step({"a": 3})
    host.leave_row("a")
    host.add_pooling("c", PROMPTS["c"])
    output = host.step()
    for req_id in ("a", "c"):
        assert value(output, req_id) == np.float32(expected(PROMPTS[req_id], pooling_type))


def test_every_token() -> None:
    host = pooling_host("mean")
    host.add_pooling("a", PROMPTS["a"], "token_embed")
    assert host.step({"a": 4}).pooled == {}
    found = value(host.step({"a": 1}), "a")
    assert found.shape == (5, 1)
    assert found[:, 0].tolist() == np.array(states_of(PROMPTS["a"]), np.float32).tolist()


def test_a_step_that_fails_is_run_again_without_adding_twice() -> None:
    host = pooling_host("mean")
    host.add_pooling("a", PROMPTS["a"])
    host.add_pooling("bad", [1, ERROR_TOKEN, 2, 3])
    output = host.step({"a": 2, "bad": 2})  # run alone, after it has failed for both
    assert "RuntimeError: a kernel broke" in output.errors["bad"]
    output = host.step({"a": 3})
    assert value(output, "a") == np.float32(expected(PROMPTS["a"], "mean"))


def test_a_mean_has_the_same_bits_however_it_is_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(301, 64, generator=generator) * 7
    whole = MeanOfTokens().add(hidden).result()
    torch.testing.assert_close(whole, hidden.double().mean(0).float(), atol=1e-7, rtol=0)
    for size in (1, 7, 64, 300):
        state = MeanOfTokens()
        for piece in hidden.split(size):
            state = state.add(piece)
        assert torch.equal(state.result(), whole)
