"""The promise: a request's tokens and log-probabilities have the same bits however it is run."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from helpers.prompts import long_prompt
from tokenmill import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.model

POOL = 1 << 29
PROMPTS = [
    "The capital of France is",
    "def quicksort(items):\n",
    "人工智能是",
    "🎉 Happy",
    long_prompt(900),
    long_prompt(400),
    long_prompt(900) + " And then",
    "The",
]


def requests() -> tuple[list[str], list[SamplingParams]]:
    """Prompts and their parameters, greedy and random in turn, half of them with penalties."""
    common: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "logprobs": 3}
    choices: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.95, "top_k": 50},
    ]
    penalties: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
    return PROMPTS, [
        SamplingParams(seed=i, **common, **choices[i % 2], **(penalties if i % 4 < 2 else {}))
        for i in range(len(PROMPTS))
    ]


Result = list[tuple[list[int], list[dict[int, float]]]]


def results(outputs: list[RequestOutput]) -> Result:
    return [
        (
            output.outputs[0].token_ids,
            [
                {token_id: entry.logprob for token_id, entry in position.items()}
                for position in output.outputs[0].logprobs or []
            ],
        )
        for output in outputs
    ]


def engine(dtype: str, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {"kv_cache_memory_bytes": POOL, "max_model_len": 512}
    return LLM(dtype=dtype, **(defaults | settings))


@functools.cache
def alone(dtype: str) -> Result:
    with engine(dtype, enable_prefix_caching=False) as llm:
        return [
            result
            for prompt, params in zip(*requests(), strict=True)
            for result in results(llm.generate(prompt, params))
        ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
class TestB111:
    def test_all_at_once(self, dtype: str) -> None:
        with engine(dtype, enable_prefix_caching=False) as llm:
            assert results(llm.generate(*requests())) == alone(dtype)

    @pytest.mark.parametrize("budget", [7, pytest.param(16, marks=pytest.mark.slow), 64])
    def test_in_chunks(self, dtype: str, budget: int) -> None:
        with engine(dtype, max_num_batched_tokens=budget, max_num_seqs=7) as llm:
            assert results(llm.generate(*requests())) == alone(dtype)

    def test_preempted(self, dtype: str) -> None:
        small = {"num_kv_blocks": 10, "block_size": 32, "max_model_len": 288}
        with engine(dtype, kv_cache_memory_bytes=None, **small) as llm:
            outputs = llm.generate(*requests())
            assert results(outputs) == alone(dtype)
            assert sum(output.metrics.num_preemptions for output in outputs) > 0

    def test_cached(self, dtype: str) -> None:
        with engine(dtype) as llm:
            llm.generate(*requests())
            outputs = llm.generate(*requests())
            assert results(outputs) == alone(dtype)
            assert sum(output.num_cached_tokens for output in outputs) > 200

    def test_planned_ahead(self, dtype: str) -> None:
        with engine(dtype, async_scheduling=True, max_num_batched_tokens=64) as llm:
            assert results(llm.generate(*requests())) == alone(dtype)

    def test_one_thread(self, dtype: str) -> None:
        with engine(dtype, num_threads=1) as llm:
            assert results(llm.generate(*requests())) == alone(dtype)
