"""Gemma 3 270M, the second real model, against transformers with the dequantised weights."""

from __future__ import annotations

import pytest
import torch

from helpers.gemma import gemma_reference
from helpers.models import PagedRun, model_config
from helpers.prompts import long_prompt, varied_prompts
from tokenmill import LLM, SamplingParams
from tokenmill.attention.cpu import CpuBackend
from tokenmill.attention.reference import ReferenceBackend
from tokenmill.checkpoint.names import resolve_model
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.kernels import native
from tokenmill.models.loader import load_model
from tokenmill.tokenizer.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

NEAR = 1e-3
"""Where the reference's two best logits are nearer than this, either may win."""


def prompts() -> list[str]:
    """A few short ones, and one longer than the window of 512."""
    return [*varied_prompts()[::7], long_prompt(3000)]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("double  spaces", [2, 7902, 138, 35220]),
        ("  lead", [2, 138, 40227]),
        ("don't  stop\r\n", [2, 13246, 236789, 236745, 138, 11412, 251, 107]),
        ("x = 1\n    y", [2, 236781, 578, 236743, 236770, 107, 140, 236762]),
        ("π 人工智能 🎉🎉 <h1>", [2, 237161, 23253, 237496, 33455, 204906, 242061, 236743, 184]),
    ],
)
def test_ids_equal_those_of_llama_cpp(text: str, ids: list[int]) -> None:
    tokenizer_data = open_checkpoint(resolve_model("gemma3-270m")).tokenizer_data
    tokenizer = load_tokenizer(tokenizer_data)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@torch.inference_mode()
def test_logits_equal_transformers() -> None:
    checkpoint = open_checkpoint(resolve_model("gemma3-270m"))
    model = load_model(model_config(checkpoint.config, max_model_len=1024), checkpoint)
    backend = CpuBackend() if native.is_available() else ReferenceBackend()
    run = PagedRun(model, "float32", backend=backend, block_size=32)
    generator = torch.Generator().manual_seed(1)
    ids = [2, *torch.randint(1000, 200_000, (600,), generator=generator).tolist()]
    found = model.compute_logits(run.prefill("a", ids, chunk=250)[-100:])
    expected = gemma_reference()(torch.tensor([ids]), logits_to_keep=100).logits[0]
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-4)


@torch.inference_mode()
def test_greedy_ids_and_logprobs_equal_transformers() -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    settings = {"device": "cpu", "kv_cache_memory_bytes": 1 << 28, "max_model_len": 2048}
    with LLM("gemma3-270m", dtype="float32", **settings) as llm:
        outputs = llm.generate(prompts(), params)
    compared = 0
    for output in outputs:
        sequence = output.outputs[0]
        ids = [*output.prompt_token_ids, *sequence.token_ids]
        assert ids[0] == 2  # the beginning of a text
        logits = gemma_reference()(
            torch.tensor([ids[:-1]]), logits_to_keep=len(sequence.token_ids)
        ).logits[0]
        for row, token_id, step in zip(
            logits, sequence.token_ids, sequence.logprobs or [], strict=True
        ):
            best, second = row.topk(2).values.tolist()
            if token_id != int(row.argmax()):
                assert best - second < NEAR
                break
            assert abs(step[token_id].logprob - float(row.log_softmax(-1)[token_id])) < 1e-3
            compared += 1
    assert compared > len(outputs) * 24 * 0.95


def test_packed_weights_give_the_same_bits_in_a_batch_and_in_pieces() -> None:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    settings = {"device": "cpu", "kv_cache_memory_bytes": 1 << 28, "max_model_len": 2048}
    with LLM("gemma3-270m", max_num_seqs=1, **settings) as llm:
        alone = [output.outputs for output in llm.generate(prompts(), params)]
    with LLM("gemma3-270m", max_num_batched_tokens=48, **settings) as llm:
        assert [output.outputs for output in llm.generate(prompts(), params)] == alone
