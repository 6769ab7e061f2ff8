"""A model with latent attention and groups of experts on the parts of a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.family_models import prompt, saved
from helpers.gpu_engine import generate, gpu_engine
from tokenmill import LLM, RequestOutput, SamplingParams
from tokenmill.worker.graphs.cuda import GraphSizes

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered", "ignore:invalid value encountered"
)
"""Integers of a hash wrap, and padding is computed from whatever memory held before; numpy, which
the interpreter computes with, warns of both."""

PROMPTS = [prompt(6, 1), prompt(4, 2)]
"""Together few enough for one tile of a product."""
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=0),
    SamplingParams(temperature=1, seed=3, max_tokens=4, ignore_eos=True, logprobs=0),
]
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 16, "max_model_len": 16}


def results(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs)
        for output in outputs
    ]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """Each request by itself."""
    outputs = []
    for ids, params in zip(PROMPTS, PARAMS, strict=True):
        outputs += generate(gpu_engine(saved("deepseek-v3"), **SETTINGS), [ids], [params])
    return results(outputs)


def test_results_are_those_of_the_cpu(alone: list[Any]) -> None:
    settings = SETTINGS | {"device": "cpu", "skip_tokenizer_init": True}
    with LLM(str(saved("deepseek-v3")), **settings) as llm:
        expected = results(llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS))
    for (mine, logprobs, of_prompt), (theirs, *wanted) in zip(alone, expected, strict=True):
        assert mine == theirs
        for found, known in zip((logprobs, of_prompt), wanted, strict=True):
            for entry, same in zip(found or (), known or (), strict=True):
                for token_id in entry or ():
                    assert entry[token_id].logprob == pytest.approx(
                        same[token_id].logprob, abs=1e-4
                    )


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 4, "max_num_seqs": 3},
        pytest.param(
            {"sizes": GraphSizes((4,), (16,), 3, 16), "max_num_seqs": 3}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"num_kv_blocks": 4, "block_size": 4, "max_num_batched_tokens": 16},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["chunked", "padded", "preempted"],
)
def test_the_same_bits_however_requests_are_run(alone: list[Any], settings: dict[str, Any]) -> None:
    outputs = generate(gpu_engine(saved("deepseek-v3"), **SETTINGS | settings), PROMPTS, PARAMS)
    assert results(outputs) == alone
    preempted = any(output.metrics.num_preemptions for output in outputs)
    assert preempted == ("num_kv_blocks" in settings)
