"""A second model drafts: results are the same, and its cache follows whatever happens to requests.

A model that drafts for itself says exactly what it will say: with everything right about positions,
seeds, parameters, blocks and what is computed of them, every draft holds. One slot with the wrong
keys would show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.speculation import engine, plain, requests, results, run
from helpers.tiny import write_tiny_llama, write_wide_llama
from tokenmill import LLM
from tokenmill.contracts.request import SchedulerStats
from tokenmill.errors import ConfigError, ModelNotFoundError
from tokenmill.kernels import native
from tokenmill.worker.graphs.decode import NativeDecodeSteps


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A model, another one of the same vocabulary, and one of another vocabulary."""
    directory = tmp_path_factory.mktemp("draft")
    one = write_wide_llama(directory / "one")
    other = write_wide_llama(directory / "other", seed=1, num_hidden_layers=1)
    strange = write_tiny_llama(directory / "strange", vocab_size=777)
    return str(one), str(other), str(strange)


def stats_of(llm: LLM) -> SchedulerStats:
    return llm.llm_engine._client.core.scheduler.make_stats()


def draft_by(path: str, **settings: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": path, "num_speculative_tokens": 4, **settings}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 24, "max_num_seqs": 20},
        {"num_kv_blocks": 14, "max_model_len": 128},
        {"async_scheduling": True},
        {"check_graphs": True},
        {"enforce_eager": True},
        {"enable_prefix_caching": False},
    ],
    ids=lambda settings: ",".join(f"{name}={settings[name]}" for name in settings) or "default",
)
@pytest.mark.parametrize("adaptive", [False, True])
def test_every_draft_of_the_same_model_holds(
    paths: tuple[str, str, str], settings: dict[str, Any], adaptive: bool
) -> None:
    path = paths[0]
    with engine(path, speculative_config=draft_by(path, adaptive=adaptive), **settings) as llm:
        outputs = run(llm)
        again = run(llm)  # prefixes are cached now
        stats = stats_of(llm)
    expected = plain(path)
    assert results(outputs) == expected
    assert results(again) == expected
    # Grammars cut drafts before they are counted, and budgets cut others: all that is left holds.
    assert stats.num_accepted_tokens == stats.num_draft_tokens >= (0 if adaptive else 200)
    if "num_kv_blocks" in settings:
        assert stats.num_preemptions > 0
    if not settings and not adaptive:
        assert stats.prefix_cache_hits > 0
        assert stats.num_draft_tokens > 3.5 * stats.num_drafts


@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_cache_dtype": "int8"}, {"dtype": "float32"}, {"logprobs_mode": "raw_logits"}],
)
def test_results_are_the_same_with_another_model(
    paths: tuple[str, str, str], settings: dict[str, Any]
) -> None:
    path, other, _ = paths
    with engine(path, speculative_config=draft_by(other, adaptive=False), **settings) as llm:
        outputs = run(llm)
        stats = stats_of(llm)
    assert results(outputs) == plain(path, **settings)
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0


def test_a_model_that_is_no_good_is_hardly_asked(paths: tuple[str, str, str]) -> None:
    path, other, _ = paths
    made = []
    for adaptive in (False, True):
        with engine(path, speculative_config=draft_by(other, adaptive=adaptive)) as llm:
            for _ in range(3):
                run(llm)
            made.append(stats_of(llm).num_draft_tokens)
    assert made[1] < 0.5 * made[0]


@pytest.mark.skipif(not native.is_available(), reason="the native kernels are not here")
def test_drafts_are_made_in_native_steps(paths: tuple[str, str, str]) -> None:
    path = paths[0]
    with engine(path, speculative_config=draft_by(path, adaptive=False)) as llm:
        drafter = llm.llm_engine._client.core._executor._worker.runner._drafter
        steps = drafter._runner._decode_steps
        assert isinstance(steps, NativeDecodeSteps)
        before = sum(steps.kernel_seconds)
        run(llm)
        assert sum(steps.kernel_seconds) > before


def test_it_is_in_the_ledger(paths: tuple[str, str, str]) -> None:
    path, other, _ = paths
    with engine(path) as llm:
        plain_ledger = llm.llm_engine.config.ledger
    with engine(path, spec_model=other, spec_tokens=2) as llm:
        config = llm.llm_engine.config
        pool = llm.llm_engine._client.core._executor._worker.kv_cache_config
    assert config.speculation is not None
    draft = config.speculation.draft
    assert draft is not None
    assert config.ledger.draft == draft.num_bytes > 0
    num_slots = config.cache.num_blocks * config.cache.block_size
    extra = num_slots * draft.kv_bytes_per_token
    assert config.ledger.kv_pool == plain_ledger.kv_pool + extra
    assert pool.num_blocks == config.cache.num_blocks


def test_what_cannot_draft_is_refused(paths: tuple[str, str, str]) -> None:
    path, other, strange = paths
    with pytest.raises(ConfigError, match=r"vocabulary of 777 tokens, but .* has \d+"):
        engine(path, spec_model=strange)
    with pytest.raises(ModelNotFoundError, match=r"nowhere"):
        engine(path, spec_model="/nowhere/at/all")
    windows = {"architectures": ["MistralForCausalLM"], "sliding_window": 32}
    with pytest.raises(ConfigError, match=r"every layer of this one has a sliding window"):
        engine(path, spec_model=other, hf_overrides=windows)


def test_a_request_ends_where_the_context_of_the_model_that_drafts_does(
    paths: tuple[str, str, str], tmp_path: Path
) -> None:
    """Behind its context it drafts nothing, and the request goes on."""
    path = paths[0]
    short = str(write_wide_llama(tmp_path / "short", max_position_embeddings=40))
    prompts, params = requests()
    with engine(path, speculative_config=draft_by(short, adaptive=False)) as llm:
        outputs = llm.generate(prompts[:6], params[:6], use_tqdm=False)
        stats = stats_of(llm)
    assert results(outputs) == plain(path)[:6]
    assert stats.num_draft_tokens > 0
    longest = max(
        len(output.prompt_token_ids) + output.metrics.num_accepted_tokens for output in outputs
    )
    assert longest <= 80
