"""Drafts in several ranks: whoever drafts, the results are those without drafts.

The ranks are threads here (`helpers/rank_threads.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.rank_threads import llm_in_threads
from helpers.tiny import write_wide_llama
from tokenmill import LLM, SamplingParams
from tokenmill.kernels import native

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")

PROMPTS = [
    {"prompt_token_ids": [3 + (7 * i + j % period) % 300 for j in range(length)]}
    for i, (length, period) in enumerate(((40, 5), (9, 3), (50, 8), (33, 4)))
]
"""Each repeats itself; together they outgrow the pool."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 32,
    "num_kv_blocks": 9,
    "max_model_len": 128,
    "max_num_batched_tokens": 48,
}
BOTH = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small weights: it repeats itself, so that drafts hold."""
    path = tmp_path_factory.mktemp("drafts")
    return write_wide_llama(path, num_hidden_layers=3, initializer_range=0.05)


def results(llm: LLM) -> list[Any]:
    params = [
        SamplingParams(
            temperature=0.2 * (i % 2), seed=i, max_tokens=40, ignore_eos=True, logprobs=0
        )
        for i in range(len(PROMPTS))
    ]
    return [
        (
            output.outputs[0].token_ids,
            [entry.logprob for step in output.outputs[0].logprobs for entry in step.values()],
        )
        for output in llm.generate(PROMPTS, params, use_tqdm=False)
    ]


def num_held(llm: LLM) -> int:
    return sum(llm.llm_engine._client.core.scheduler.make_stats().num_accepted_tokens_per_pos)


@pytest.mark.parametrize(
    ("method", "size"),
    [
        ("ngram", {"tensor_parallel_size": 2}),
        ("ngram", {"pipeline_parallel_size": 2}),
        pytest.param("ngram", BOTH, marks=pytest.mark.slow),
        pytest.param("suffix", BOTH, marks=pytest.mark.slow),
    ],
    ids=["tp", "pp", "both", "suffix"],
)
def test_lookups_change_nothing(path: Path, method: str, size: dict[str, Any]) -> None:
    if "tensor_parallel_size" in size:
        with llm_in_threads(path, **SETTINGS, **size) as (llm, _):
            expected = results(llm)
    else:
        with LLM(str(path), device="cpu", enforce_eager=True, **SETTINGS) as llm:
            expected = results(llm)
    speculation = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    with llm_in_threads(path, speculative_config=speculation, **SETTINGS, **size) as (llm, _):
        assert results(llm) == expected
        assert num_held(llm) > 10


def test_a_model_that_drafts_is_divided_too(path: Path, tmp_path: Path) -> None:
    """Whatever it drafts; how much of it, each rank's clock would say otherwise."""
    draft = write_wide_llama(tmp_path, num_hidden_layers=1, initializer_range=0.05)
    speculation = {"model": str(draft), "num_speculative_tokens": 3}
    size = {"tensor_parallel_size": 2}
    with llm_in_threads(path, **SETTINGS, **size) as (llm, _):
        expected = results(llm)
    for more in ({}, {"adaptive": False}):
        settings = SETTINGS | size | {"speculative_config": speculation | more}
        with llm_in_threads(path, **settings) as (llm, ranks):
            assert results(llm) == expected
            if more:
                assert num_held(llm) > 0
            for worker in ranks.workers.values():
                drafting = worker.runner._drafter.runner._model
                (attention,) = drafting.attention_layers().values()
                assert attention.num_heads == 1, "of the two"
