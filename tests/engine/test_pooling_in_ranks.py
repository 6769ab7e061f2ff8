"""Models that pool, in several ranks: the vectors and scores of one process.

The ranks are threads here (`helpers/rank_threads.py`).
"""

from __future__ import annotations

from typing import Any

import pytest

from helpers.pooling import decoder, open_pooling, prompts
from helpers.rank_threads import llm_in_threads
from tokenmill import LLM, PoolingParams
from tokenmill.kernels import native

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")

PROMPTS = prompts(30, 70, 1, 64, 120)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "num_kv_blocks": 40,
    "block_size": 32,
    "max_model_len": 150,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 3,
}
SIZES: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]


def results(llm: LLM, task: str) -> list[list[float]]:
    outputs = llm.encode(PROMPTS, PoolingParams(task=task), use_tqdm=False)
    return [output.outputs.data.flatten().tolist() for output in outputs]


def one_by_one(llm: LLM, task: str) -> list[list[float]]:
    params = PoolingParams(task=task)
    outputs = [llm.encode(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS]
    return [output.outputs.data.flatten().tolist() for output in outputs]


@pytest.mark.parametrize(
    ("architecture", "task", "settings"),
    [
        ("LlamaForCausalLM", "embed", {"runner": "pooling"}),
        ("Qwen3Model", "embed", {"pooler_config": {"pooling_type": "mean"}}),
        ("LlamaForCausalLM", "token_embed", {"runner": "pooling"}),
        ("Qwen3ForSequenceClassification", "classify", {}),
    ],
    ids=["last", "mean", "tokens", "classes"],
)
def test_ranks_pool_as_one_process_does(
    architecture: str, task: str, settings: dict[str, Any]
) -> None:
    _, path = decoder(architecture, num_hidden_layers=3)
    settings = SETTINGS | settings
    with open_pooling(path, **settings) as llm:
        expected = one_by_one(llm, task)
    for size in SIZES:
        with llm_in_threads(path, **settings, **size) as (llm, _):
            found = one_by_one(llm, task)
            assert results(llm, task) == found, "in pieces, beside others and from the cache"
        if "tensor_parallel_size" not in size:
            assert found == expected
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
