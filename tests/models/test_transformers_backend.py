"""Decoders on transformers' code: its own logits and tokens, on our attention and matrices."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch

from helpers.families import FAMILIES
from helpers.family_models import prompt
from helpers.library_models import library_engine, reference_logits, saved
from helpers.models import PagedRun, model_config
from helpers.transformers_families import LIBRARY_FAMILIES, LibraryFamily
from tokenmill import LLM, SamplingParams
from tokenmill.attention.cpu import CpuBackend
from tokenmill.attention.reference import ReferenceBackend
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.kernels import native
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.loader import load_model
from tokenmill.models.registry import has_native_family

SHARED = prompt(64, 1)
PROMPTS = [prompt(30, 2), SHARED + prompt(24, 3), SHARED + prompt(7, 5), [11]]
MAX_TOKENS = 8

over_families = pytest.mark.parametrize("family", LIBRARY_FAMILIES, ids=lambda family: family.name)


def test_the_table_says_which_families_are_native() -> None:
    native_ones = {family.architecture for family in FAMILIES}
    for family in LIBRARY_FAMILIES:
        assert family.is_native == (family.architecture in native_ones)
        assert family.is_native == has_native_family(family.architecture)


@pytest.mark.parametrize("kernels", ["torch", "native"])
@over_families
def test_logits_equal_transformers(family: LibraryFamily, kernels: str) -> None:
    is_torch = kernels == "torch"
    if not is_torch and not native.is_available():
        return  # the other case has covered this machine
    checkpoint = open_checkpoint(saved(family.name))
    config = dataclasses.replace(model_config({**checkpoint.config}), implementation="transformers")
    model = load_model(config, checkpoint, kernels=PlainKernels() if is_torch else None)
    has_native_attention = not is_torch and family.name not in ("gpt-oss", "deepseek-v3")
    backend = CpuBackend() if has_native_attention else ReferenceBackend()
    run = PagedRun(model, "float32", backend=backend, block_size=32)
    ids = prompt(130, 6)
    found = model.compute_logits(run.prefill("a", ids, chunk=37))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference_logits(family.name, ids), atol=1e-4, rtol=0)


@over_families
def test_greedy_tokens_equal_transformers(family: LibraryFamily) -> None:
    """In a batch, in pieces, and with the beginning from the cache; nothing is asked for where no
    family is native.
    """
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in PROMPTS]
    settings: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 4}
    if not family.is_native:
        settings["model_impl"] = "auto"
    with library_engine(saved(family.name), "float32", **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts, params, use_tqdm=False)
    assert sum(output.num_cached_tokens for output in again) >= 64
    for output in [*outputs, *again]:
        token_ids = output.outputs[0].token_ids
        ids = [*output.prompt_token_ids, *token_ids]
        logits = reference_logits(family.name, ids[:-1])[len(output.prompt_token_ids) - 1 :]
        assert token_ids == logits.argmax(-1).tolist()
        logprobs = logits.log_softmax(-1)
        steps = output.outputs[0].logprobs or []
        for row, token_id, step in zip(logprobs, token_ids, steps, strict=True):
            assert abs(step[token_id].logprob - float(row[token_id])) < 2e-4


@pytest.mark.parametrize(
    ("name", "implementation"), [("llama", "tokenmill"), ("arcee", "transformers")]
)
def test_native_families_stay_native_unless_asked(
    name: str, implementation: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"device": "cpu", "num_kv_blocks": 8, "max_model_len": 64}
    with (
        caplog.at_level("INFO", logger="tokenmill"),
        LLM(str(saved(name)), skip_tokenizer_init=True, **settings) as llm,
    ):
        assert llm.llm_engine.config.model.implementation == implementation
    says_so = "model_impl=transformers: there is no native family for ArceeForCausalLM"
    assert (says_so in caplog.text) == (implementation == "transformers")


def test_the_library_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys, tokenmill.models.loader, tokenmill.models.transformers_backend.load;"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
