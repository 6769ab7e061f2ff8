"""The default model in float32 against transformers with the dequantised weights."""

from __future__ import annotations

import pytest
import torch

from helpers.prompts import long_prompt, varied_prompts
from helpers.reference import reference_model
from tokenmill import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.model

NEAR = 1e-3
"""Where the reference's two best logits are nearer than this, either may win."""


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32", kv_cache_memory_bytes=1 << 30, max_num_seqs=64) as llm:
        yield llm


def reference_logits(output: RequestOutput, last: int = 0) -> torch.Tensor:
    """float32 [num_tokens - 1, vocab_size]: row i predicts token i + 1 of prompt and output; only
    the `last` rows, if that is not 0.
    """
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    with torch.inference_mode():
        return reference_model()(torch.tensor([ids[:-1]]), logits_to_keep=last).logits[0]


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_greedy_ids_and_logprobs_equal_transformers(llm: LLM, every: int) -> None:
    """Prompts of all kinds and lengths: all of them, or one in `every`."""
    prompts = varied_prompts()[::every]
    outputs = llm.generate(
        prompts,
        SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=2),
    )
    compared = 0
    for output in outputs:
        sequence = output.outputs[0]
        assert len(sequence.token_ids) == 64
        logits = reference_logits(output, last=64)
        logprobs = torch.log_softmax(logits, -1)
        for row, logprob, token_id, position in zip(
            logits, logprobs, sequence.token_ids, sequence.logprobs, strict=True
        ):
            best, second = row.topk(2).values.tolist()
            if token_id != int(row.argmax()):
                assert best - second < NEAR
                break
            assert abs(position[token_id].logprob - float(logprob[token_id])) < 1e-3
            compared += 1
    assert compared > len(prompts) * 64 * 0.98


def test_prompt_logprobs_equal_transformers(llm: LLM) -> None:
    prompts = ["Hello", *varied_prompts()[16:44:4], long_prompt(2500)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    for output in llm.generate(prompts, params):
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        reference = torch.log_softmax(reference_logits(output), -1)
        for i, position in enumerate(output.prompt_logprobs[1:]):
            token_id = output.prompt_token_ids[i + 1]
            assert position is not None
            assert next(iter(position)) == token_id
            assert 3 <= len(position) <= 4
            for candidate, entry in position.items():
                assert abs(entry.logprob - float(reference[i, candidate])) < 1e-3
            rank = int((reference[i] >= reference[i, token_id]).sum())
            assert abs(position[token_id].rank - rank) <= 1
