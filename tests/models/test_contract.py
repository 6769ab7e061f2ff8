"""What every model family keeps, on small random weights: transformers' logits and tokens, and the
same bits however a request is run.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.families import FAMILIES, Family
from helpers.family_models import prompt, reference_logits, saved
from helpers.models import PagedRun, model_config
from tokenmill import LLM, SamplingParams
from tokenmill.attention.cpu import CpuBackend
from tokenmill.attention.reference import ReferenceBackend
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.kernels import native
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.loader import load_model

MAX_TOKENS = 12


SHARED = prompt(64, 1)
PROMPTS = [prompt(30, 2), SHARED + prompt(24, 3), prompt(60, 4), SHARED + prompt(7, 5), [11]]


def requests() -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """Greedy and random in turn."""
    common: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 2}
    return [{"prompt_token_ids": ids} for ids in PROMPTS], [
        SamplingParams(temperature=0, **common)
        if i % 2 == 0
        else SamplingParams(temperature=0.9, top_k=30, seed=i, **common)
        for i in range(len(PROMPTS))
    ]


def engine(family: Family, dtype: str, **settings: Any) -> LLM:
    defaults = {"num_kv_blocks": 32, "max_model_len": 256, "skip_tokenizer_init": True}
    return LLM(str(saved(family.name)), dtype=dtype, device="cpu", **(defaults | settings))


def run(llm: LLM) -> list[Any]:
    """Tokens and log-probabilities of the requests."""
    return [
        (
            output.outputs[0].token_ids,
            [
                {i: entry.logprob for i, entry in step.items()}
                for step in output.outputs[0].logprobs
            ],
        )
        for output in llm.generate(*requests(), use_tqdm=False)
    ]


over_families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@pytest.mark.parametrize("kernels", ["torch", "native"])
@over_families
def test_logits_equal_transformers(family: Family, kernels: str) -> None:
    is_torch = kernels == "torch"
    if not is_torch and not native.is_available():
        return  # the other case has covered this machine
    checkpoint = open_checkpoint(saved(family.name))
    model = load_model(
        model_config(checkpoint.config),
        checkpoint,
        kernels=PlainKernels() if is_torch else None,
    )
    run = PagedRun(
        model,
        "float32",
        backend=CpuBackend()
        if family.has_native_attention and not is_torch
        else ReferenceBackend(),
        block_size=32,
    )
    ids = prompt(290, 6)
    found = model.compute_logits(run.prefill("a", ids, chunk=77))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference_logits(family.name, ids), atol=1e-4, rtol=0)


@over_families
def test_greedy_tokens_equal_transformers(family: Family) -> None:
    """In a batch, in pieces, and with the beginning from the cache."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    with engine(family, "float32", max_num_batched_tokens=48, max_num_seqs=5) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts, params, use_tqdm=False)
    assert sum(output.num_cached_tokens for output in again) >= 64
    for output in [*outputs, *again]:
        token_ids = output.outputs[0].token_ids
        ids = [*output.prompt_token_ids, *token_ids]
        logits = reference_logits(family.name, ids[:-1])[len(output.prompt_token_ids) - 1 :]
        assert token_ids == logits.argmax(-1).tolist()
        logprobs = logits.log_softmax(-1)
        for row, token_id, step in zip(
            logprobs, token_ids, output.outputs[0].logprobs or [], strict=True
        ):
            assert abs(step[token_id].logprob - float(row[token_id])) < 2e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@over_families
def test_the_same_bits_however_requests_are_run(family: Family, dtype: str) -> None:
    with engine(family, dtype, enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = run(llm)
    with engine(family, dtype) as llm:
        assert run(llm) == alone  # at once
        assert run(llm) == alone  # from the cache
    with engine(family, dtype, max_num_batched_tokens=7, max_num_seqs=5) as llm:
        assert run(llm) == alone  # in pieces
    with engine(family, dtype, num_kv_blocks=6, max_model_len=160) as llm:
        outputs = llm.generate(*requests(), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [ids for ids, _ in alone]
        preemptions = sum(output.metrics.num_preemptions for output in outputs)
        # Six blocks of states are enough; test_states.py has fewer.
        assert (preemptions > 0) == family.has_attention


@pytest.mark.parametrize("settings", [{"dtype": "float16"}, {"quantization": "int4"}], ids=str)
@over_families
def test_other_types_have_the_same_bits_in_pieces(family: Family, settings: dict[str, Any]) -> None:
    if "quantization" in settings and not native.is_available():
        return  # refused by the settings
    settings = {"dtype": "bfloat16"} | settings
    with engine(family, **settings) as llm:
        together = run(llm)
    assert all(len(token_ids) == MAX_TOKENS for token_ids, _ in together)
    with engine(family, max_num_batched_tokens=7, max_num_seqs=5, **settings) as llm:
        assert run(llm) == together


@over_families
def test_which_steps_are_recorded(family: Family, caplog: pytest.LogCaptureFixture) -> None:
    if not native.is_available():
        return  # nothing is
    with (
        caplog.at_level(logging.INFO, logger="tokenmill"),
        engine(family, "bfloat16", check_graphs=True) as llm,
    ):
        assert all(token_ids for token_ids, _ in run(llm))
    assert ("forward pass recorded" in caplog.text) == family.is_recorded
    assert ("not recorded: it runs torch's" in caplog.text) != family.is_recorded


@over_families
def test_dummy_weights(family: Family, tmp_path: Path) -> None:
    shutil.copy(saved(family.name) / "config.json", tmp_path)
    with LLM(
        str(tmp_path),
        load_format="dummy",
        device="cpu",
        skip_tokenizer_init=True,
        num_kv_blocks=8,
        max_model_len=128,
    ) as llm:
        (output,) = llm.generate(
            [{"prompt_token_ids": [1, 2, 3]}],
            SamplingParams(max_tokens=4, ignore_eos=True),
            use_tqdm=False,
        )
    assert len(output.outputs[0].token_ids) == 4
