"""Results are the same with speculation and without, whatever a request asks for."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from helpers.speculation import engine, freeze, plain, requests, results, run
from helpers.tiny import write_wide_llama
from tokenmill import RequestOutput, SamplingParams
from tokenmill.kernels import native
from tokenmill.worker.graphs.decode import NativeDecodeSteps

LOOKUP = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
    "adaptive": False,
}
"""As many drafts as there can be: most of them are wrong."""


@functools.cache
def model(directory: Path) -> str:
    return str(write_wide_llama(directory / "wide"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model(tmp_path_factory.getbasetemp())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}},
        {"speculative_config": {"method": "suffix", "adaptive": False}},
        {"dtype": "float32"},
        {"max_num_batched_tokens": 24, "max_num_seqs": 20},
        {"num_kv_blocks": 12, "max_model_len": 128},
        {"async_scheduling": True},
        {"check_graphs": True},
        {"enforce_eager": True},
        {"enable_prefix_caching": False},
        {"kv_cache_dtype": "int8"},
        {"hf_overrides": {"architectures": ["MistralForCausalLM"], "sliding_window": 32}},
        {"block_size": 16},
        {"logprobs_mode": "processed_logprobs"},
    ],
    ids=lambda settings: ",".join(f"{name}={settings[name]}" for name in settings) or "default",
)
def test_b112_all_at_once_with_drafts_is_each_alone_without(
    path: str, settings: dict[str, Any]
) -> None:
    changing = ("dtype", "kv_cache_dtype", "logprobs_mode", "hf_overrides", "block_size")
    same = {name: settings[name] for name in changing if name in settings}
    expected = plain(path, **{name: freeze(value) for name, value in same.items()})
    with engine(path, **({"speculative_config": LOOKUP} | settings)) as llm:
        outputs = run(llm)
        again = run(llm)  # prefixes are cached now
        stats = llm.llm_engine._client.core.scheduler.make_stats()
    assert results(outputs) == expected
    assert results(again) == expected
    if "speculative_config" not in settings:  # else it depends on what steps take
        assert stats.num_draft_tokens > stats.num_accepted_tokens > 0
    if "num_kv_blocks" in settings:
        assert stats.num_preemptions > 0
    told = sum(output.metrics.num_draft_tokens for output in [*outputs, *again])
    held = sum(output.metrics.num_accepted_tokens for output in [*outputs, *again])
    assert (told, held) == (stats.num_draft_tokens, stats.num_accepted_tokens)


@pytest.mark.skipif(not native.is_available(), reason="the native kernels are not here")
def test_steps_without_drafts_stay_native(path: str) -> None:
    with engine(path, speculative_config=LOOKUP) as llm:
        steps = llm.llm_engine._client.core._executor._worker.runner._decode_steps
        assert isinstance(steps, NativeDecodeSteps)
        before = sum(steps.kernel_seconds)
        params = SamplingParams(temperature=2.0, seed=1, max_tokens=20, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        assert sum(steps.kernel_seconds) > before
    assert output.metrics.num_draft_tokens < 60


def test_an_abort_with_drafts_in_flight_harms_nobody(path: str) -> None:
    prompts, params = requests()
    with engine(path, speculative_config=LOOKUP) as llm:
        core = llm.llm_engine
        for index in range(8):
            core.add_request(str(index), prompts[index], params[index])
        outputs: dict[str, RequestOutput] = {}
        for step in range(400):
            if not core.has_unfinished_requests():
                break
            for output in core.step():
                outputs[output.request_id] = output
            if step in (3, 5, 6):
                core.abort_request([str(step)])
    expected = plain(path)
    for index in (0, 1, 2, 4, 7):
        assert outputs[str(index)].outputs[0].token_ids == expected[index][1][0][0]
