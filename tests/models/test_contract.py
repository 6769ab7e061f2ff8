"""What every model family keeps, on small random weights: transformers' logits and tokens, and the
same bits however a request is run.
"""

from __future__ import annotations

import atexit
import functools
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.families import COMMON, FAMILIES, Family
from helpers.gpu_engine import generate, gpu_engine
from helpers.models import PagedRun, model_config
from tokenmill import LLM, SamplingParams
from tokenmill.attention.cpu import CpuBackend
from tokenmill.attention.reference import ReferenceBackend
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import ConfigError
from tokenmill.kernels import native
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.loader import load_model

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
"""Integers of a hash wrap; numpy, which Triton's interpreter computes with, warns of that."""

VOCAB_SIZE = COMMON["vocab_size"]
MAX_TOKENS = 12


@functools.cache
def saved(name: str) -> Path:
    """The directory of a family's model, written by transformers."""
    path = Path(tempfile.mkdtemp(prefix="tokenmill-family-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    reference(name).save_pretrained(path)
    return path


@functools.cache
def reference(name: str) -> Any:
    """transformers' model with random weights everywhere, biases and norms included."""
    (family,) = (each for each in FAMILIES if each.name == name)
    config = getattr(transformers, family.config_class)(
        **family.settings(), attn_implementation="eager"
    )
    torch.manual_seed(3)
    model = getattr(transformers, family.architecture)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 or parameter_name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model


@torch.inference_mode()
def reference_logits(name: str, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), vocab_size]"""
    found: torch.Tensor = reference(name)(torch.tensor([ids])).logits[0]
    return found


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


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
        assert sum(output.metrics.num_preemptions for output in outputs) > 0


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


@over_families
def test_on_the_parts_of_a_gpu(family: Family) -> None:
    """The tokens of the CPU, or a message that says what is missing."""
    settings = {"dtype": "float32", "num_kv_blocks": 16, "max_model_len": 40}
    ids = prompt(9, 7)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    if not family.runs_on_gpu:
        with pytest.raises(ConfigError, match=r"no kernel for a GPU.*device='cpu'"):
            gpu_engine(saved(family.name), **settings)
        return
    (output,) = generate(gpu_engine(saved(family.name), **settings), [ids], [params])
    found = output.outputs[0].token_ids
    logits = reference_logits(family.name, [*ids, *found[:-1]])
    assert found == logits[len(ids) - 1 :].argmax(-1).tolist()
