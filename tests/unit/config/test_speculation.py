"""Settings of speculation: what they mean, what follows, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tokenmill.config.draft_model import DraftFiles
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.machine import Machine
from tokenmill.config.memory import render
from tokenmill.config.resolve import resolve
from tokenmill.config.speculation import SpeculativeConfig, read_speculative_config
from tokenmill.errors import ConfigError, MemoryBudgetError

GIB = 1 << 30
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
BAMBA = LLAMA | {
    "architectures": ["BambaForCausalLM"],
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
}
SHAPES = {"embed": (1000, 64), "layers": (500, 1000)}


def resolved(
    model: dict[str, Any] = LLAMA, draft: DraftFiles | None = None, **settings: Any
) -> Any:
    return resolve(
        EngineArgs(**settings),
        path="model",
        config=model,
        tensor_shapes=SHAPES,
        tensor_formats=dict.fromkeys(SHAPES, "F32"),
        machine=Machine(num_cpus=2, total_memory=24 * GIB, available_memory=4 * GIB),
        draft=draft,
    )


def read(**settings: Any) -> SpeculativeConfig | None:
    return read_speculative_config(EngineArgs(**settings))


def test_without_settings_there_is_none() -> None:
    assert read() is None
    assert read(speculative_config=None) is None
    config = resolved()
    assert config.speculation is None
    assert config.num_speculative_tokens == 0
    assert config.max_num_sampled == config.scheduler.max_num_seqs


def test_the_dict_that_users_of_vllm_know() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    config = read(speculative_config=given)
    assert config is not None
    assert (config.method, config.num_speculative_tokens) == ("ngram", 4)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (3, 4)
    assert config.adaptive


def test_short_flags_are_the_same() -> None:
    short = read(spec_method="ngram", spec_tokens=4)
    assert short == read(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    mixed = read(spec_tokens=4, speculative_config={"method": "ngram", "adaptive": False})
    assert mixed is not None
    assert (mixed.num_speculative_tokens, mixed.adaptive) == (4, False)


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, (3, 5)),
        ({"prompt_lookup_min": 7}, (7, 7)),
        ({"prompt_lookup_max": 2}, (2, 2)),
        ({"prompt_lookup_min": 2}, (2, 5)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 2}, (2, 2)),
    ],
)
def test_one_length_of_a_lookup_gives_way_to_the_other(
    given: dict[str, int], lengths: tuple[int, int]
) -> None:
    config = read(speculative_config={"method": "ngram", **given})
    assert config is not None
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == lengths


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spec_method": "ngrams"}, r"method='ngrams' is not one of: .*ngram.*Did you mean"),
        ({"spec_tokens": 4}, r"needs a method: ngram"),
        ({"spec_method": "draft_model"}, r"draft_model, eagle and eagle3 need a model"),
        ({"spec_method": "ngram", "spec_model": "x"}, r"model='x' do not belong together"),
        ({"speculative_config": {"model": "x", "draft": {}}}, r"has no 'draft'"),
        ({"spec_method": "ngram", "spec_tokens": 0}, r"=0 must lie between 1 and 128"),
        ({"spec_method": "ngram", "spec_tokens": 129}, r"=129 must lie between 1 and 128"),
        ({"speculative_config": {"metod": "ngram"}}, r"no 'metod'.*'method'.*It takes: method"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": "4"}},
            r"speculative_config\.num_speculative_tokens='4' must be an integer",
        ),
        (
            {
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
                "spec_tokens": 4,
            },
            r"spec_tokens=4 and speculative_config\.num_speculative_tokens=3 contradict",
        ),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "prompt_lookup_min": 6,
                    "prompt_lookup_max": 2,
                }
            },
            r"prompt_lookup_min=6 and prompt_lookup_max=2 must be in order",
        ),
        (
            {"speculative_config": {"method": "ngram", "prompt_lookup_max": 65}},
            r"between 1 and 64",
        ),
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_max_tree_depth": 0}},
            r"max_tree_depth=0 must lie between 1 and 64",
        ),
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_min_token_prob": 0.0}},
            r"min_token_prob=0.0 must be more than 0",
        ),
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_cache_bytes": 100}},
            r"cache_bytes=100 must be at least 4096",
        ),
        ({"speculative_config": {"method": 3}}, r"speculative_config\.method=3 must be a string"),
        ({"speculative_config": "ngram"}, r"speculative_config='ngram' must be a dict"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        read(**settings)


def test_a_model_alone_means_that_it_drafts() -> None:
    config = read(spec_model="x")
    assert config is not None
    assert (config.method, config.model) == ("draft_model", "x")
    assert (config.num_speculative_tokens, config.num_lookahead_tokens) == (4, 4)


def files(**changes: Any) -> DraftFiles:
    shapes = {"embed": (1000, 32), "layers": (100, 32)}
    model = LLAMA | {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64} | changes
    return DraftFiles("draft", model, shapes, dict.fromkeys(shapes, "F32"))


def test_a_model_that_drafts_takes_its_part_of_the_memory() -> None:
    plain = resolved(num_kv_blocks=100)
    config = resolved(num_kv_blocks=100, spec_model="x", draft=files())
    draft = config.speculation.draft
    assert draft.kv_bytes_per_token == 2 * 2 * 8 * 2  # K and V, heads, head size, bf16
    assert config.ledger.draft == draft.num_bytes > 1100 * 32 * 2
    slots = config.cache.num_blocks * config.cache.block_size
    assert config.ledger.kv_pool - plain.ledger.kv_pool == slots * draft.kv_bytes_per_token
    assert "draft" in render(config.ledger)
    assert "draft" not in render(plain.ledger)


def test_its_tower_takes_no_memory() -> None:
    both = {"architectures": ["LlavaForConditionalGeneration"]}
    plain = files(**both)
    shapes = dict(plain.tensor_shapes) | {"vision_tower.x.weight": (5000, 32)}
    beside = DraftFiles("draft", plain.config, shapes, dict.fromkeys(shapes, "F32"))
    alone, found = (resolved(spec_model="x", draft=each).ledger.draft for each in (plain, beside))
    assert alone == found


def test_its_context_may_be_shorter() -> None:
    config = resolved(spec_model="x", draft=files(max_position_embeddings=100))
    assert config.speculation.draft.max_model_len == 100


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"vocab_size": 999}, r"model='x' has a vocabulary of 999 tokens, but .* has 1000"),
        (BAMBA | {"hidden_size": 64}, r"model='x' has state-space layers"),
    ],
)
def test_models_that_cannot_draft_are_refused(draft: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(spec_model="x", draft=files(**draft))


def test_more_than_fits_is_refused_with_what_fits() -> None:
    with pytest.raises(MemoryBudgetError, match=r"largest num_kv_blocks that fits is"):
        resolved(num_kv_blocks=10_000_000, spec_model="x", draft=files())


def test_models_that_cannot_forget_a_token_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"BambaForCausalLM has state-space layers"):
        resolved(BAMBA, spec_method="ngram")


def test_pooling_models_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM runs as a pooling model"):
        resolved(runner="pooling", spec_method="ngram")


def test_more_rows_of_logits_are_in_the_ledger() -> None:
    plain = resolved(max_num_seqs=8, max_num_batched_tokens=64)
    drafting = resolved(
        max_num_seqs=8, max_num_batched_tokens=64, spec_method="ngram", spec_tokens=3
    )
    assert drafting.max_num_sampled == 32
    assert drafting.ledger.workspace - plain.ledger.workspace == 4 * 4 * 24 * 1000
    assert (
        resolved(max_num_seqs=8, max_num_batched_tokens=16, spec_method="ngram").max_num_sampled
        == 16
    )


def test_tables_of_lookups_are_in_the_ledger() -> None:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    assert resolved(**sizes, spec_method="ngram").ledger.draft == 2 * 9 * 3 * 8 * 2048
    suffix = resolved(**sizes, spec_method="suffix")
    assert suffix.ledger.draft == 16 << 20
    assert suffix.speculation.num_suffix_places == 1 << 20
    assert suffix.speculation.num_suffix_places * 12 <= suffix.ledger.draft


def test_steps_are_planned_one_at_a_time_unless_somebody_says_otherwise() -> None:
    assert resolved(spec_method="ngram").scheduler.max_steps_in_flight == 1
    ahead = resolved(spec_method="ngram", async_scheduling=True)
    assert ahead.scheduler.max_steps_in_flight == 2
