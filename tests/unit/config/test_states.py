"""Models with state-space layers: what their configs say, and their part of the memory."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.machine import Machine
from tokenmill.config.memory import render
from tokenmill.config.parameters import read_parameters
from tokenmill.config.resolve import resolve
from tokenmill.config.state_space import num_state_blocks
from tokenmill.contracts.kv_cache import StateSpec
from tokenmill.errors import ConfigError
from tokenmill.models.bamba import time_step_limits

CONFIG: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "attn_layer_indices": [2],
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_d_state": 32,
}
SHAPES = {"embed": (1000, 64)}


def resolved(available: int = 4 << 30, **settings: Any) -> EngineConfig:
    return resolve(
        EngineArgs(**settings),
        path="model",
        config=CONFIG,
        tensor_shapes=SHAPES,
        tensor_formats=dict.fromkeys(SHAPES, "F32"),
        machine=Machine(num_cpus=2, total_memory=24 << 30, available_memory=available),
    )


def test_sizes() -> None:
    parameters = read_parameters(CONFIG)
    sizes = parameters.states
    assert sizes is not None
    assert (parameters.num_kv_layers, sizes.num_layers) == (1, 3)
    assert (sizes.num_heads, sizes.head_size, sizes.num_channels) == (8, 16, 128 + 64)
    spec = StateSpec(sizes.num_channels, 3, 8, 16, 32)
    assert sizes.bytes_per_block == 3 * spec.bytes_per_block
    body = read_parameters(CONFIG | {"architectures": ["BambaModel"]})
    assert body.states == sizes
    llama = CONFIG | {"architectures": ["LlamaForCausalLM"]}
    assert read_parameters(llama).states is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mamba_n_heads": 0}, "mamba_n_heads is 0"),
        ({"mamba_d_head": 24}, "are not mamba_expand"),
        ({"mamba_n_groups": 3}, "mamba_n_heads=8 is not a multiple of mamba_n_groups=3"),
        ({"attn_layer_indices": None}, "must list some of the 4 layers"),
        ({"attn_layer_indices": []}, "some of the 4 layers, and not all"),
        ({"attn_layer_indices": [4]}, "must list some of the 4 layers"),
        ({"attn_layer_indices": [0, 1, 2, 3]}, "must list some of the 4 layers"),
    ],
)
def test_configs_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_parameters(CONFIG | changes)


def test_time_step_limits() -> None:
    infinity = float("inf")
    for given, expected in (
        (None, (0.0, infinity)),
        ([0.5, 2], (0.5, 2.0)),
        ([0.0, {"__float__": "Infinity"}], (0.0, infinity)),
        ([0.0, "inf"], (0.0, infinity)),
    ):
        assert time_step_limits({"time_step_limit": given}) == expected
    for wrong in ([1.0], [2.0, 1.0], ["a", 1.0], 3, [{}, 1.0], [float("nan"), 1.0]):
        with pytest.raises(ConfigError, match="time_step_limit"):
            time_step_limits({"time_step_limit": wrong})


def test_states_have_their_part_of_the_memory() -> None:
    config = resolved(max_num_seqs=16)
    ledger = config.ledger
    sizes = read_parameters(CONFIG).states
    assert sizes is not None
    assert ledger.num_state_blocks == 1 + 5 * 16
    assert ledger.states == ledger.num_state_blocks * sizes.bytes_per_block
    parts = ledger.weights + ledger.workspace + ledger.reserve + ledger.states + ledger.kv_pool
    assert parts + ledger.left == ledger.available
    assert "states" in render(ledger)
    assert "81 blocks" in render(ledger)
    one_layer = 2 * 2 * 16 * 2  # K and V, KV heads, head size, bfloat16
    assert ledger.kv_pool == config.cache.num_blocks * config.cache.block_size * one_layer


def test_little_memory_holds_fewer_states_but_those_of_one_sequence() -> None:
    sizes = read_parameters(CONFIG).states
    assert sizes is not None
    size = sizes.bytes_per_block
    assert num_state_blocks(sizes, 10, 1000 * size) == 51
    assert num_state_blocks(sizes, 10, 50 * size) == 20
    assert num_state_blocks(sizes, 10, 0) == 4
