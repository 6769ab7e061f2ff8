"""A KV cache of another type than the activations: exact, half the bytes, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import tiny_llama, write_wide_llama
from tokenmill import LLM, SamplingParams
from tokenmill.errors import ConfigError

PROMPTS = [
    [(i * 37 + 11 * j) % 390 + 3 for j in range(length)]
    for i, length in enumerate((3, 40, 100, 300, 31))
]
PROMPTS.append([*PROMPTS[3], 5, 6, 7])
PARAMS = [
    SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=9, ignore_eos=True, logprobs=1)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide_llama(tmp_path_factory.mktemp("wide") / "model")


def engine(model: Path, kv_cache_dtype: str, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {"num_kv_blocks": 64, "max_model_len": 320, "device": "cpu"}
    return LLM(str(model), kv_cache_dtype=kv_cache_dtype, **(defaults | settings))


def bits(outputs: list[Any]) -> list[Any]:
    return [
        (
            output.outputs[0].token_ids,
            [
                {i: each.logprob for i, each in place.items()}
                for place in output.outputs[0].logprobs
            ],
        )
        for output in outputs
    ]


@pytest.mark.parametrize("kv_dtype", ["int8", "float32"])
def test_the_same_bits_however_a_request_is_run(model: Path, kv_dtype: str) -> None:
    with engine(model, kv_dtype, enable_prefix_caching=False, num_threads=1) as llm:
        alone = [
            result
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
            for result in bits(llm.generate([prompt], params))
        ]
    with engine(model, kv_dtype, check_graphs=True) as llm:
        together = llm.generate(PROMPTS, PARAMS)
        cached = llm.generate(PROMPTS, PARAMS)
        assert llm.llm_engine.config.cache.dtype == kv_dtype
    assert bits(together) == alone
    assert bits(cached) == alone
    assert sum(output.num_cached_tokens for output in cached) > 300
    with engine(model, kv_dtype, max_num_batched_tokens=7, max_num_seqs=6) as llm:
        assert bits(llm.generate(PROMPTS, PARAMS)) == alone
    with engine(model, kv_dtype, num_kv_blocks=12, enforce_eager=True) as llm:
        tight = llm.generate(PROMPTS, PARAMS)
    assert bits(tight) == alone
    assert sum(output.metrics.num_preemptions for output in tight) > 0


def test_int8_is_as_near_to_float32_as_bfloat16_is(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    logprobs = {}
    for kv_dtype in ("float32", "bfloat16", "int8"):
        with engine(model, kv_dtype) as llm:
            (output,) = llm.generate([PROMPTS[3]], params)
        places = zip(PROMPTS[3][1:], (output.prompt_logprobs or [])[1:], strict=True)
        logprobs[kv_dtype] = [place[token].logprob for token, place in places if place]

    def distance(kv_dtype: str) -> float:
        pairs = zip(logprobs[kv_dtype], logprobs["float32"], strict=True)
        return sum(abs(a - b) for a, b in pairs)

    assert distance("bfloat16") > 0
    assert 0.5 * distance("bfloat16") < distance("int8") < 4 * distance("bfloat16")


def test_a_pool_of_the_same_bytes_holds_nearly_twice_the_tokens(model: Path) -> None:
    tokens = {}
    for kv_dtype in ("bfloat16", "int8", "float32"):
        with engine(
            model, kv_dtype, num_kv_blocks=None, kv_cache_memory_bytes=1 << 22, max_model_len=512
        ) as llm:
            ledger = llm.llm_engine.config.ledger
            tokens[kv_dtype] = ledger.kv_tokens
            cache = llm.llm_engine._client.core._executor._worker.kv_cache_config  # type: ignore
            assert cache.num_blocks * cache.bytes_per_block == ledger.kv_pool <= 1 << 22
            assert ("int8 KV cache" in llm.llm_engine.summary) == (kv_dtype == "int8")
    # A head of 64 values takes 128 bytes, 64 with 4 for its scale, or 256.
    assert tokens["int8"] / tokens["bfloat16"] == pytest.approx(128 / 68, rel=0.03)
    assert tokens["float32"] / tokens["bfloat16"] == pytest.approx(1 / 2, rel=0.03)


def test_what_no_kernel_can_do_is_refused_with_all_reasons() -> None:
    with pytest.raises(ConfigError) as caught:
        engine(tiny_llama(), "int8")  # its heads have 16 values
    assert "head size 16 is not one of" in str(caught.value)
    assert "KV dtype int8 is not dtype bfloat16" in str(caught.value)
    with pytest.raises(ConfigError, match="KV dtype 'float16' is not one of"):
        engine(tiny_llama(), "float16")
