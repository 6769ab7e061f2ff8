"""Two engines, one of which computes prompts for the other: the bits of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.kv_engines import engine, prompts
from tokenmill import LLM, SamplingParams
from tokenmill.errors import InvalidRequestError

PREFILL = {"kv_transfer_params": {"do_remote_decode": True}}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))


def connected(
    name: str, role: str, tmp_path: Path, policy: str = "recompute", **settings: Any
) -> LLM:
    secret = tmp_path / "secret"
    secret.write_text("what both engines know")
    config = {
        "kv_connector": "TCPConnector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"secret_file": str(secret)},
    }
    return engine(name, kv_transfer_config=config, **settings)


def ask(llm: LLM, prompt: dict[str, Any], max_tokens: int = 12, **extra: Any) -> Any:
    params = SamplingParams(
        temperature=0.9,
        seed=5,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=1,
        extra_args=extra or None,
    )
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output


def result(output: Any) -> Any:
    return output.outputs[0].token_ids, output.outputs[0].logprobs


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("wide", {"kv_cache_dtype": "int8"}),
        ("windows", {}),
        pytest.param("bamba", {}, marks=pytest.mark.slow),
    ],
    ids=["int8", "windows", "states"],
)
def test_the_bits_are_those_of_one_engine(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    with engine(name, enable_prefix_caching=False, **settings) as llm:
        expected = [result(ask(llm, prompt)) for prompt in prompts()]
    with (
        connected(name, "kv_producer", tmp_path, **settings) as first,
        connected(name, "kv_consumer", tmp_path, max_num_batched_tokens=32, **settings) as second,
    ):
        for prompt, wanted in zip(prompts(), expected, strict=True):
            prefilled = ask(first, prompt, 1, **PREFILL)
            assert prefilled.outputs[0].token_ids == wanted[0][:1]
            held = prefilled.kv_transfer_params
            output = ask(second, prompt, kv_transfer_params=held)
            assert result(output) == wanted
            num_full = (len(prompt["prompt_token_ids"]) - 1) // 32
            assert output.num_cached_tokens == 32 * num_full
        assert output.num_external_tokens > 0
        with pytest.raises(InvalidRequestError, match="gives KV"):
            ask(second, prompts()[0], 1, **PREFILL)


@pytest.mark.parametrize("name", ["bamba", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_a_prompt_of_whole_blocks_gives_what_another_can_go_on_behind(
    name: str, tmp_path: Path
) -> None:
    """States are kept behind its last block only, and the one before is what the other needs."""
    prompt = {"prompt_token_ids": prompts()[0]["prompt_token_ids"][:96]}
    with engine(name, enable_prefix_caching=False) as llm:
        expected = result(ask(llm, prompt))
    with (
        connected(name, "kv_producer", tmp_path) as first,
        connected(name, "kv_consumer", tmp_path, policy="fail") as second,
    ):
        held = ask(first, prompt, 1, **PREFILL).kv_transfer_params
        output = ask(second, prompt, kv_transfer_params=held)
    assert result(output) == expected
    assert output.num_external_tokens == 64, "as far as the first chunk went"


def test_an_engine_that_has_ended_is_done_without(tmp_path: Path) -> None:
    with engine(enable_prefix_caching=False) as llm:
        expected = result(ask(llm, prompts()[0]))
    with connected("wide", "kv_both", tmp_path) as second:
        with connected("wide", "kv_both", tmp_path) as first:
            held = ask(first, prompts()[0], 1, **PREFILL).kv_transfer_params
        output = ask(second, prompts()[0], kv_transfer_params=held)
        assert result(output) == expected
        assert output.num_external_tokens == 0
