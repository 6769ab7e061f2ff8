"""Layers with and without a window: blocks out of it are freed, and no bit changes."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny import write_tiny_llama
from tokenmill import LLM, SamplingParams

WINDOW = 40
LENGTHS = (300, 150, 260, 31, 220)


@functools.cache
def model() -> Path:
    return write_tiny_llama(
        Path(tempfile.mkdtemp(prefix="tokenmill-windows-")),
        num_hidden_layers=3,
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )


def prompts() -> list[dict[str, Any]]:
    """The last two begin alike, for longer than the window."""
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 390, (length,), generator=draw).tolist() for length in LENGTHS]
    ids.append(ids[-1][:200] + ids[3])
    return [{"prompt_token_ids": each} for each in ids]


def engine(dtype: str, **settings: Any) -> LLM:
    defaults = {"num_kv_blocks": 64, "block_size": 32, "max_model_len": 384, "device": "cpu"}
    return LLM(str(model()), dtype=dtype, **(defaults | settings))


def run(llm: LLM, batches: list[list[dict[str, Any]]]) -> list[Any]:
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True, logprobs=1)
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs)
        for batch in batches
        for output in llm.generate(batch, params, use_tqdm=False)
    ]


@functools.cache
def alone(dtype: str) -> list[Any]:
    with engine(dtype, enable_prefix_caching=False) as llm:
        return run(llm, [[prompt] for prompt in prompts()])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_kv_blocks", "settings"),
    [
        (14, {}),
        (12, {"max_num_batched_tokens": 24, "max_num_seqs": 6}),
        (14, {"async_scheduling": True}),
    ],
    ids=["together", "in pieces", "two steps in flight"],
)
def test_in_a_pool_that_is_too_small_for_all(dtype, num_kv_blocks, settings):
    with engine(dtype, num_kv_blocks=num_kv_blocks, **settings) as llm:
        assert run(llm, [prompts()]) == alone(dtype)
        assert llm.llm_engine._client.core.scheduler.make_stats().num_preemptions > 0


def test_the_null_block_is_zero():
    with engine("bfloat16") as llm:
        model = llm.llm_engine._client.core._executor._running_worker().runner._model
        caches = [layer._kv_cache for layer in model.attention_layers().values()]
    assert len(caches) == 3
    assert len({cache.data_ptr() for cache in caches}) == 1  # three groups of one layer
    assert not caches[0][0].any()


def test_a_sequence_of_any_length_holds_a_window_of_blocks():
    with engine("bfloat16", max_num_batched_tokens=32, max_num_seqs=4) as llm:
        scheduler = llm.llm_engine._client.core.scheduler
        llm.llm_engine.add_request("long", prompts()[0], SamplingParams(max_tokens=30))
        most = 0
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            most = max(most, scheduler.make_stats().num_used_blocks)
        whole = -(-(300 + 30) // 32)
        windowed = -(-(WINDOW - 1 + 32) // 32) + 1
        assert most <= whole + 2 * windowed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cached_prefix_is_found_by_its_last_window(dtype):
    with engine(dtype) as llm:
        params = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True, logprobs=1)
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts()]
    assert outputs[-1].num_cached_tokens == 192
    found = [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
    assert found == alone(dtype)
