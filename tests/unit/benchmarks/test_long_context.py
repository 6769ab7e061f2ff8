"""A long prompt beside a request that decodes: which steps there are, and what is made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.tiny import write_wide_llama
from tokenmill import LLM
from tokenmill.entrypoints.bench.cost import AttentionCost, ModelCost, RequestWork
from tokenmill.entrypoints.bench.recorder import StepRecord

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


def step(kernel_seconds: float, *work: RequestWork) -> StepRecord:
    return StepRecord(work, len(work), 1.0, kernels={"attention": (2, kernel_seconds)})


def test_the_rate_counts_each_query_and_key_once():
    from long_context import attention_rate

    layer = AttentionCost(num_heads=4, head_size=64, kv_bytes_per_token=100, window=None)
    cost = ModelCost(0, 0, 0, 0, attention=(layer, layer), in_blocks=True)
    steps = [step(0.5, RequestWork(3, 10, 0)), step(1.5, RequestWork(1, 11, 1))]
    pairs = (8 + 9 + 10) + 11
    assert attention_rate(steps, cost) == 2 * 4 * 4 * 64 * pairs / 2.0


def test_the_other_request_gets_a_token_of_each_step_until_the_prompt_is_done(tmp_path):
    from long_context import DECODE_STEPS, run

    settings = {"num_kv_blocks": 64, "max_model_len": 320, "max_num_batched_tokens": 32}
    model = write_wide_llama(tmp_path / "model")
    with LLM(str(model), device="cpu", enable_prefix_caching=False, **settings) as llm:
        steps = run(llm, 200)
    beside = [each for each in steps if not each.is_decode]
    alone = [each for each in steps if each.is_decode]
    assert sum(each.num_tokens for each in beside) == 200 + len(beside)
    assert all(each.work[0].num_tokens == 1 for each in beside)
    assert all(each.kernels["attention"][1] > 0 for each in beside)
    assert len(alone) == DECODE_STEPS
    assert [each.work[0].seq_len for each in alone] == list(range(201, 201 + DECODE_STEPS))
