"""The rows of a stage that does not sample: it is told the tokens of requests that it still has."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from helpers.core import create_request
from helpers.family_models import saved
from helpers.models import model_config
from tokenmill.attention.backend import CacheLimits
from tokenmill.attention.reference import ReferenceBackend
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.contracts.plan import NewRequestData, SchedulerOutput
from tokenmill.contracts.result import SampledTokens
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.loader import load_model
from tokenmill.parallel.group import SOLO
from tokenmill.worker.attention_groups import AttentionGroup
from tokenmill.worker.limits import RunnerLimits
from tokenmill.worker.model_runner import ModelRunner
from tokenmill.worker.stage import PassingRunner, ReceivingForward, StageModel, StageWorker

NO_CACHE = KVCacheConfig(0, 16, ())


class Sent:
    """Keeps what is sent, and hands it over; a stage that receives nothing waits in vain."""

    def __init__(self) -> None:
        self.streams: list[torch.Tensor] = []

    def send(self, stream: torch.Tensor) -> None:
        self.streams.append(stream.clone())

    def receive(self, num_tokens: int, hidden_size: int) -> torch.Tensor:
        stream = self.streams.pop(0)
        assert stream.shape == (num_tokens, hidden_size)
        return stream


def make_stage(rank: int, links: Sent) -> StageWorker:
    """One of the two stages of the small Llama."""
    kernels, checkpoint = PlainKernels(), open_checkpoint(saved("llama"))
    part = load_model(
        model_config(checkpoint.config), checkpoint, kernels=kernels, layers=range(rank, rank + 1)
    )
    backend, groups = ReferenceBackend(), []
    for name, layer in part.attention_layers().items():
        spec = layer.spec("float32", 16)
        layer.bind(backend.make_impl(spec), torch.zeros(backend.get_kv_cache_shape(spec, 16)))
        builder = backend.make_metadata_builder(spec, CacheLimits(16, 4, 32, 64))
        groups.append(AttentionGroup(0, (name,), builder))
    model = StageModel(part, kernels, 128, is_first=rank == 0)
    limits = RunnerLimits(4, 32, 64, 16, 97)
    if rank == 0:
        return StageWorker(PassingRunner(model, groups, limits, links=links), NO_CACHE, None, SOLO)
    runner = ModelRunner(model, groups, limits)
    runner.wrap_forward(partial(ReceivingForward, links=links, hidden_size=128))
    return StageWorker(runner, NO_CACHE, None, SOLO)


def enter(req_id: str, row: int, token_ids: list[int], block: int) -> NewRequestData:
    return NewRequestData.from_request(
        create_request(token_ids, request_id=req_id),
        row=row,
        token_ids=token_ids,
        num_computed_tokens=0,
        block_ids=([block],),
    )


def step(step_id: int, row: int, req_id: str, count: int, **changes: Any) -> SchedulerOutput:
    return SchedulerOutput(step_id, [req_id], [row], [count], [1], [True], **changes)


def test_a_request_goes_through_both_stages() -> None:
    links = Sent()
    first, last = make_stage(0, links), make_stage(1, links)
    plan = step(0, 2, "a", 3, scheduled_new_reqs=[enter("a", 2, [5, 6, 7], 1)])
    tokens = []
    for step_id in range(1, 5):
        first.execute_model(plan)
        last.execute_model(plan)
        output = last.sample_tokens(None).result()
        tokens += output.sampled_token_ids[0]
        first.learn(SampledTokens(["a"], [2], output.sampled_token_ids))
        plan = step(step_id, 2, "a", 1)
    rows = first.runner.rows
    assert rows.token_ids[2, :7].tolist() == [5, 6, 7, *tokens]
    assert rows.num_tokens[2] == last.runner.rows.num_tokens[2] == 7
    assert rows.num_computed_tokens[2] == 6


def test_tokens_of_a_request_that_has_left_its_row_are_forgotten() -> None:
    links = Sent()
    first = make_stage(0, links)
    first.execute_model(step(0, 1, "a", 2, scheduled_new_reqs=[enter("a", 1, [5, 6], 1)]))
    news = [enter("b", 1, [8, 9, 10], 2)]
    first.execute_model(step(1, 1, "b", 3, finished_rows=[1], scheduled_new_reqs=news))
    first.learn(SampledTokens(["a"], [1], [[50]]))
    assert first.runner.rows.num_tokens[1] == 3
    first.learn(SampledTokens(["b"], [1], [[51]]))
    assert first.runner.rows.token_ids[1, :4].tolist() == [8, 9, 10, 51]


def test_a_step_that_fails_is_not_tried_again_in_one_stage() -> None:
    last = make_stage(1, Sent())  # nothing has been sent
    with pytest.raises(IndexError):
        last.execute_model(step(0, 1, "a", 2, scheduled_new_reqs=[enter("a", 1, [5, 6], 1)]))
