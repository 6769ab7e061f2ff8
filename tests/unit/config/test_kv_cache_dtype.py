"""When a KV cache is int8 without being asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.kv_cache_dtype import INT8_BLOCK_UNIT, INT8_HEAD_SIZES
from tokenmill.config.machine import Accelerator, Machine
from tokenmill.config.memory import summary
from tokenmill.config.resolve import resolve
from tokenmill.kernels.paged_attention import unsupported_reasons

GIB = 1 << 30
NATIVE = Machine(2, 24 * GIB, 4 * GIB, isa="avx2")
WITH_GPU = dataclasses.replace(
    NATIVE, accelerator=Accelerator("NVIDIA H200", (9, 0), 140 * GIB, 100 * GIB)
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}


def resolved(
    config: dict[str, Any] | None = None,
    *,
    on: Machine = NATIVE,
    formats: tuple[str, str] = ("Q8_0", "Q4_1"),
    **settings: Any,
) -> EngineConfig:
    shapes = {"model.embed_tokens.weight": (1000, 256), "layers": (5000, 1024)}
    return resolve(
        EngineArgs(**settings),
        path="model",
        config={**CONFIG, **(config or {})},
        tensor_shapes=shapes,
        tensor_formats=dict(zip(shapes, formats, strict=True)),
        machine=on,
    )


@pytest.mark.parametrize("isa", ["amx", "avx512", "avx2"])
@pytest.mark.parametrize("formats", [("Q8_0", "Q4_1"), ("F16", "Q4_K"), ("Q6_K", "Q8_0")])
def test_beside_weights_in_blocks_it_is(isa: str, formats: tuple[str, str]) -> None:
    config = resolved(on=dataclasses.replace(NATIVE, isa=isa), formats=formats)
    assert (config.model.dtype, config.cache.dtype) == ("bfloat16", "int8")
    (reason,) = [each for each in config.reasons if each.setting == "kv_cache_dtype"]
    assert reason.value == "int8"
    assert "int8 KV cache" in summary(config)
    config = resolved(kv_cache_memory_bytes=1 << 24, formats=formats)
    plain = resolved(kv_cache_memory_bytes=1 << 24, kv_cache_dtype="bfloat16", formats=formats)
    assert plain.cache.dtype == "bfloat16"
    assert config.ledger.kv_tokens > 1.8 * plain.ledger.kv_tokens


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantising_on_load_counts_as_blocks(quantization: str) -> None:
    assert resolved(formats=("BF16", "BF16")).cache.dtype == "bfloat16"
    assert resolved(formats=("BF16", "BF16"), quantization=quantization).cache.dtype == "int8"


@pytest.mark.parametrize(
    "settings",
    [
        {"formats": ("F32", "BF16")},
        {"formats": ("BF16", "F16")},
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"on": dataclasses.replace(NATIVE, isa="reference")},
        {"on": WITH_GPU},
        {"config": {"architectures": ["Qwen2ForCausalLM"]}},
        {"config": {"architectures": ["Gemma3ForCausalLM"]}},
        {"config": {"head_dim": 16}},
        {"block_size": 16},
        {"attention_backend": "reference"},
        {"attention_backend": "somewhere:Backend"},
        {"model_impl": "transformers"},
        {"runner": "pooling"},
    ],
    ids=str,
)
def test_elsewhere_it_is_the_type_of_the_activations(settings: dict[str, Any]) -> None:
    config = resolved(**settings)
    assert config.cache.dtype == config.model.dtype
    assert "kv_cache_dtype" not in [reason.setting for reason in config.reasons]


def test_the_native_kernels_take_what_is_chosen() -> None:
    for head_size in INT8_HEAD_SIZES:
        reasons = unsupported_reasons("int8", 4, 2, head_size, INT8_BLOCK_UNIT)
        assert not [reason for reason in reasons if "processor" not in reason]
