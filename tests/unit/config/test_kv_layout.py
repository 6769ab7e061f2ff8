"""The KV pool's arithmetic, and that it is what the worker makes of the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from helpers.families import FAMILIES, Family
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.kv_layout import KVLayout, kv_layout, model_windows
from tokenmill.config.machine import Machine
from tokenmill.config.memory import StepShape, layer_kv_bytes
from tokenmill.config.parameters import read_parameters
from tokenmill.config.resolve import resolve
from tokenmill.config.windows import layer_windows
from tokenmill.errors import ConfigError, MemoryBudgetError
from tokenmill.models.loader import EmptyTensorsOnMeta
from tokenmill.models.registry import get_model_class
from tokenmill.simulate.model import cache_of
from tokenmill.worker.kv_cache import kv_cache_config

GIB = 1 << 30
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "sliding_window": 64,
}
"""Five layers with a window of 64 tokens, and one without."""


def layout(*, max_model_len: int = 4096, budget: int = 64) -> KVLayout:
    step = StepShape(1, budget, max_model_len)
    return KVLayout(16, layer_windows(GEMMA), bytes_per_token=64, step=step)


def resolved(config: dict[str, Any] = GEMMA, **settings: Any):
    return resolve(
        EngineArgs(**{"max_num_batched_tokens": 64, "block_size": 16, **settings}),
        path="model",
        config=config,
        tensor_shapes={"embed": (1000, 64)},
        tensor_formats={"embed": "F32"},
        machine=Machine(num_cpus=2, total_memory=4 * GIB, available_memory=4 * GIB),
    )


def test_windowed_groups_need_no_more_for_longer_sequences() -> None:
    """A window of 64 and a step of 64 are 127 tokens: 8 blocks of 16, and one for the borders."""
    ours = layout()
    assert ours.num_groups() == 6
    assert ours.blocks_needed(16) == 6
    assert ours.blocks_needed(9 * 16) == 6 * 9
    assert ours.blocks_needed(4096) == 5 * 9 + 256
    assert ours.bytes_needed(4096) == (5 * 9 + 256) * 16 * 64


def test_a_window_as_long_as_the_context_keeps_everything() -> None:
    ours = layout(max_model_len=64)
    assert not ours.has_windows
    assert ours.num_groups() == 1
    assert ours.blocks_needed(64) == 4
    assert ours.bytes_per_block == ours.bytes_per_whole_block
    assert ours.capacity(10) == 160


def test_the_longest_sequence_is_the_longest_that_fits() -> None:
    ours = layout()
    for num_blocks in (6, 54, 100, 300):
        longest = ours.longest_sequence(num_blocks)
        assert ours.blocks_needed(longest) <= num_blocks
        assert ours.blocks_needed(longest + 1) > num_blocks
    assert ours.longest_sequence(5) == 0
    assert ours.longest_sequence(10**6) == 4096


def test_a_length_that_fits_thanks_to_windows_is_served() -> None:
    """In six layers alike, 4,096 tokens would take 256 whole blocks."""
    config = resolved(num_kv_blocks=60)
    assert config.model.max_model_len == 4096
    assert config.ledger.kv_pool == 61 * 6 * 16 * 64
    # 61 * 6 blocks of a group, one of them null; 301 for a sequence of the full length.
    assert config.ledger.kv_tokens == 365 * 4096 // 301
    everything = {**GEMMA, "layer_types": ["full_attention"] * 6}
    with pytest.raises(MemoryBudgetError, match="fits is 960"):
        resolved(everything, num_kv_blocks=60)


def test_what_does_not_fit_in_spite_of_windows_is_refused_with_what_does() -> None:
    with pytest.raises(MemoryBudgetError, match=r"max_model_len=4096 needs .* fits is (\d+)") as no:
        resolved(num_kv_blocks=40)
    fits = int(str(no.value).split("fits is ")[1].split(";")[0])
    assert 40 * 16 < fits < 4096
    assert resolved(num_kv_blocks=40, max_model_len=-1).model.max_model_len == fits
    assert resolved(num_kv_blocks=40, max_model_len=fits).model.max_model_len == fits
    with pytest.raises(MemoryBudgetError):
        resolved(num_kv_blocks=40, max_model_len=fits + 1)


def test_no_more_is_taken_than_windows_leave_useful() -> None:
    config = resolved(max_num_seqs=2)
    needed = 2 * (5 * 9 + 256) * 16 * 64
    whole = 6 * 16 * 64
    assert config.ledger.kv_pool == (-(-needed // whole) + 1) * whole


def built(hf_config: dict[str, Any]):
    """The model, without memory for its weights."""
    family = get_model_class(hf_config["architectures"][0])
    with EmptyTensorsOnMeta():
        return family(
            {**family.config_defaults, **hf_config}, dtype=torch.float32, max_model_len=512
        )


WITH_ATTENTION = [family for family in FAMILIES if family.has_attention]
WITHOUT_ATTENTION = [family for family in FAMILIES if not family.has_attention]


@pytest.mark.parametrize("family", WITHOUT_ATTENTION, ids=lambda family: family.name)
def test_the_ledger_counts_blocks_of_states_where_there_are_no_others(family: Family) -> None:
    hf_config = getattr(transformers, family.config_class)(**family.settings()).to_dict()
    hf_config["architectures"] = [family.architecture]
    config = resolved(hf_config, dtype="float32", max_num_seqs=4)
    cache = kv_cache_config(config, built(hf_config))
    step = StepShape(4, 64, config.model.max_model_len)
    ours = kv_layout(hf_config, read_parameters(hf_config), "tokenmill", step, 32, "float32")
    (group,) = cache.groups
    assert ours.num_groups() == 1
    assert ours.bytes_per_block == len(group.layer_names) * group.spec.bytes_per_block
    for num_tokens in (1, 17, 100, 512):
        assert ours.blocks_needed(num_tokens) == group.blocks_needed(num_tokens, 32, 64)
    assert config.cache.num_blocks == cache.num_state_blocks == 1 + 3 * 4
    assert config.ledger.kv_pool == cache.num_state_blocks * ours.bytes_per_block
    assert config.ledger.states == 0
    assert [ours.longest_sequence(n) for n in (1, 2, 3)] == [32, 64, config.model.max_model_len]
    assert ours.capacity(12) == 4 * config.model.max_model_len


@pytest.mark.parametrize("family", WITH_ATTENTION, ids=lambda family: family.name)
def test_the_ledger_knows_the_groups_that_the_worker_will_make(family: Family) -> None:
    hf_config = getattr(transformers, family.config_class)(**family.settings()).to_dict()
    hf_config["architectures"] = [family.architecture]
    config = resolved(hf_config, dtype="float32", max_num_seqs=4)
    cache = kv_cache_config(config, built(hf_config))
    parameters = read_parameters(hf_config)
    ours = KVLayout(
        config.cache.block_size,
        model_windows(hf_config, parameters, "tokenmill"),
        layer_kv_bytes(parameters, config.cache.dtype),
        StepShape(4, 64, config.model.max_model_len),
    )
    assert ours.num_groups() == len(cache.token_groups)
    assert ours.bytes_per_block == cache.bytes_per_block
    for num_tokens in (1, 17, 100, 512):
        assert ours.blocks_needed(num_tokens) == cache.blocks_needed(num_tokens, 64)
    num_blocks = cache.num_usable_blocks
    assert ours.longest_sequence(num_blocks) == cache.longest_sequence(512, 64) == 512
    assert cache.num_blocks == config.ledger.kv_pool // cache.bytes_per_block


@pytest.mark.parametrize("family", WITH_ATTENTION, ids=lambda family: family.name)
def test_a_simulated_engine_has_the_pool_that_the_worker_will_make(family: Family) -> None:
    hf_config = getattr(transformers, family.config_class)(**family.settings()).to_dict()
    hf_config["architectures"] = [family.architecture]
    config = resolved(hf_config, dtype="float32", max_num_seqs=4)
    if read_parameters(hf_config).states is not None:
        with pytest.raises(ConfigError, match="keeps states, which `tokenmill simulate` does not"):
            cache_of(config)
        return
    made, found = kv_cache_config(config, built(hf_config)), cache_of(config)
    assert (found.num_blocks, found.block_size) == (made.num_blocks, made.block_size)
    kinds = [
        [(len(group.layer_names), group.spec) for group in cache.groups] for cache in (made, found)
    ]
    assert kinds[0] == kinds[1]
