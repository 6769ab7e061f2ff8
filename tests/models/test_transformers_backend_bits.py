"""Decoders on transformers' code: the same bits however a request is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.family_models import prompt
from helpers.library_models import library_engine, saved
from helpers.transformers_families import LIBRARY_FAMILIES, LibraryFamily
from tokenmill import LLM, SamplingParams
from tokenmill.kernels import native

MAX_TOKENS = 6
SHARED = prompt(64, 1)
PROMPTS = [prompt(29, 2), SHARED + prompt(24, 3), SHARED + prompt(7, 5), [11]]

over_families = pytest.mark.parametrize("family", LIBRARY_FAMILIES, ids=lambda family: family.name)


def run(llm: LLM) -> list[Any]:
    """Tokens and log-probabilities of requests, greedy and random in turn."""
    common: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 2}
    params = [
        SamplingParams(temperature=0, **common)
        if i % 2 == 0
        else SamplingParams(temperature=0.9, top_k=30, seed=i, **common)
        for i in range(len(PROMPTS))
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [
        (
            output.outputs[0].token_ids,
            [
                {i: entry.logprob for i, entry in step.items()}
                for step in output.outputs[0].logprobs
            ],
            output.metrics.num_preemptions,
        )
        for output in outputs
    ]


def results(found: list[Any]) -> list[Any]:
    return [(token_ids, logprobs) for token_ids, logprobs, _ in found]


@over_families
def test_the_same_bits_in_bfloat16(family: LibraryFamily, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(family.name)
    with library_engine(path, "bfloat16", enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = results(run(llm))
    assert "last bits" not in caplog.text
    with library_engine(path, "bfloat16", max_num_batched_tokens=7, max_num_seqs=4) as llm:
        assert results(run(llm)) == alone  # in pieces
        assert results(run(llm)) == alone  # from the cache


@pytest.mark.parametrize("name", ["granitemoe", "cohere2", "phi"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_same_bits_in_other_types(name: str, dtype: str) -> None:
    path = saved(name)
    threads = torch.get_num_threads()
    try:
        with library_engine(path, dtype, enable_prefix_caching=False, max_num_seqs=1) as llm:
            alone = results(run(llm))
        with library_engine(path, dtype, max_num_batched_tokens=9, max_num_seqs=4) as llm:
            assert results(run(llm)) == alone
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["exaone4", "olmoe"])
def test_preempted_requests_have_the_same_tokens(name: str) -> None:
    path = saved(name)
    with library_engine(path, "bfloat16") as llm:
        together = run(llm)
    with library_engine(path, "bfloat16", num_kv_blocks=5, max_model_len=128) as llm:
        short = run(llm)
    assert [ids for ids, _, _ in short] == [ids for ids, _, _ in together]
    assert sum(count for _, _, count in short) > 0


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["cohere", "granitemoe", "gpt-neox", "opt"])
def test_quantised_matrices(name: str, quantization: str) -> None:
    """Tied and untied heads, matrices of experts; the same bits in pieces."""
    if not native.is_available():
        return  # refused by the settings
    path, settings = saved(name), {"quantization": quantization}
    with library_engine(path, "bfloat16", **settings) as llm:
        together = results(run(llm))
    with library_engine(path, "bfloat16") as llm:
        plain = results(run(llm))
    assert together != plain
    with library_engine(
        path, "bfloat16", max_num_batched_tokens=7, max_num_seqs=4, **settings
    ) as llm:
        assert results(run(llm)) == together
