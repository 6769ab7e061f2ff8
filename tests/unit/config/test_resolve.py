"""Settings: what is chosen, why, and what is refused."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig, SchedulerConfig
from tokenmill.config.machine import Accelerator, Machine
from tokenmill.config.memory import Weights, render, summary
from tokenmill.config.parameters import read_parameters, rope_parameters
from tokenmill.config.quantization import held_weights
from tokenmill.config.resolve import resolve
from tokenmill.errors import ConfigError, MemoryBudgetError

GIB = 1 << 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
SHAPES = {"embed": (1000, 64), "layers": (500, 1000)}
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 2  # layers, K and V, heads, head size, bf16


def machine(*, cpus: int = 2, available: int = 4 * GIB) -> Machine:
    return Machine(num_cpus=cpus, total_memory=24 * GIB, available_memory=available)


def gpu_machine(*, free: int = 100 * GIB) -> Machine:
    gpu = Accelerator("NVIDIA H200", (9, 0), total_memory=140 * GIB, available_memory=free)
    return dataclasses.replace(machine(), accelerator=gpu)


def resolved(
    config: dict[str, Any] | None = None, on: Machine | None = None, **settings: Any
) -> EngineConfig:
    return resolve(
        EngineArgs(**settings),
        path="model",
        config=CONFIG if config is None else config,
        tensor_shapes=SHAPES,
        tensor_formats=dict.fromkeys(SHAPES, "F32"),
        machine=on or machine(),
    )


def test_everything_left_open_is_settled_with_a_reason() -> None:
    config = resolved()
    assert config.model.dtype == "bfloat16"
    assert config.model.max_model_len == 2048
    assert config.model.vocab_size == 1000
    assert config.num_threads == 2
    reasons = {reason.setting: reason.value for reason in config.reasons}
    assert reasons["dtype"] == "bfloat16"
    assert reasons["max_model_len"] == "2048"
    assert reasons["max_num_batched_tokens"] == str(config.scheduler.max_num_batched_tokens)
    assert {"block_size", "num_threads", "max_num_seqs"} <= set(reasons)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model", 5, "a string"),
        ("block_size", "16", "an integer, or None"),
        ("block_size", True, "an integer, or None"),
        ("max_model_len", 5.5, "an integer, or None"),
        ("max_num_seqs", [1], "an integer, or None"),
        ("long_prefill_token_threshold", None, "an integer"),
        ("kv_cache_memory_fraction", "half", "a number, or None"),
        ("enable_prefix_caching", "no", "True or False"),
        ("dtype", None, "a string"),
        ("hf_overrides", "{}", "a dict"),
        ("override_generation_config", [], "a dict"),
        ("seed", [1], "an integer"),
    ],
)
def test_values_of_another_type_are_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**{name: value})
    assert f"{name}={value!r} must be {words}." in str(caught.value)


def test_numbers_of_numpy_and_paths_are_taken() -> None:
    args = EngineArgs(model=Path("a/b"), block_size=np.int64(16))  # type: ignore[arg-type]
    assert (args.model, args.block_size) == ("a/b", 16)
    assert (type(args.model), type(args.block_size)) == (str, int)


def test_a_setting_that_was_made_has_no_reason() -> None:
    config = resolved(dtype="float32", block_size=16, max_model_len=128, max_num_seqs=4)
    assert (config.model.dtype, config.cache.block_size) == ("float32", 16)
    assert not {"dtype", "block_size", "max_model_len", "max_num_seqs"} & {
        reason.setting for reason in config.reasons
    }


@pytest.mark.parametrize(
    ("name", "canonical"),
    [("bf16", "bfloat16"), ("half", "float16"), ("fp32", "float32"), ("float16", "float16")],
)
def test_dtype_names(name: str, canonical: str) -> None:
    assert resolved(dtype=name).model.dtype == canonical


def test_the_kv_cache_has_the_type_of_the_activations_or_its_own() -> None:
    assert resolved(dtype="float32").cache.dtype == "float32"
    assert resolved(dtype="float32", kv_cache_dtype="fp32").cache.dtype == "float32"
    native = resolved(on=dataclasses.replace(machine(), isa="avx512"), kv_cache_dtype="int8")
    assert (native.model.dtype, native.cache.dtype) == ("bfloat16", "int8")
    with pytest.raises(ConfigError, match=r"the reference kernels\. Use kv_cache_dtype='auto'"):
        resolved(kv_cache_dtype="int8")
    amx = dataclasses.replace(machine(), isa="amx")
    exact = resolved(on=amx, dtype="float32", kv_cache_dtype="bf16")
    assert (exact.kernels, exact.cache.dtype) == ("avx512", "bfloat16")
    for isa, floats in (("i8mm", "neon"), ("portable", "portable")):
        on = dataclasses.replace(machine(), isa=isa)
        assert resolved(on=on, dtype="float32").kernels == floats
        assert resolved(on=on, dtype="bfloat16", kv_cache_dtype="int8").kernels == isa
    with pytest.raises(ConfigError, match="differs from dtype='float16'"):
        resolved(on=amx, dtype="float16", kv_cache_dtype="bf16")
    with pytest.raises(ConfigError, match="runs on the triton kernels"):
        resolved(on=gpu_machine(), kv_cache_dtype="int8")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dtype": "bfloat17"}, "Did you mean 'bfloat16'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4' is not one of: auto, "),
        ({"block_size": 17}, "the nearest is 16"),
        ({"block_size": 31}, "the nearest is 32"),
        ({"block_size": 0}, "the nearest is 1"),
        ({"block_size": 512}, "the nearest is 256"),
        ({"max_model_len": 4096}, "context length, 2048"),
        ({"max_model_len": 1}, "between 2 and"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "raise it to 64"),
        ({"max_num_batched_tokens": 100, "enable_chunked_prefill": False}, "raise it to 2048"),
        ({"scheduling_policy": "prioriti"}, "Did you mean 'priority'"),
        ({"long_prefill_token_threshold": 5000}, "between 0"),
        ({"kv_cache_memory_fraction": 0.0}, r"lie in \(0, 1\]"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"max_logprobs": -2}, "max_logprobs=-2"),
        ({"hf_overrides": {"num_hidden_layers": 0}}, "num_hidden_layers is 0"),
        ({"hf_overrides": {"rope_scaling": "{no json"}}, "not valid JSON"),
        ({"hf_overrides": {"architectures": None}}, "architectures"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        resolved(**settings)


def test_b036_kv_pool_comes_from_what_is_left() -> None:
    small = resolved(on=machine(available=GIB), max_num_seqs=512)
    large = resolved(on=machine(available=3 * GIB), max_num_seqs=512)
    assert small.cache.num_blocks < large.cache.num_blocks
    for config in (small, large):
        ledger = config.ledger
        assert ledger.kv_pool == config.cache.num_blocks * 32 * KV_BYTES_PER_TOKEN
        assert ledger.kv_pool <= (ledger.left + ledger.kv_pool) / 2
        assert ledger.kv_tokens == (config.cache.num_blocks - 1) * 32


def test_b036_explicit_sizes_are_respected() -> None:
    assert resolved(num_kv_blocks=100).cache.num_blocks == 101
    in_bytes = resolved(kv_cache_memory_bytes=101 * 32 * KV_BYTES_PER_TOKEN)
    assert in_bytes.cache.num_blocks == 101


def test_the_pool_is_no_larger_than_useful() -> None:
    config = resolved(max_num_seqs=2, max_model_len=64)
    assert config.cache.num_blocks == 2 * 2 + 1


def test_b036_a_request_that_cannot_fit_is_an_error_with_three_numbers() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        resolved(num_kv_blocks=10)
    message = str(caught.value)
    assert "max_model_len=2048" in message
    assert "fits is 320" in message
    assert message.count("MiB") + message.count("GiB") == 3


def test_b036_minus_one_takes_what_fits() -> None:
    assert resolved(num_kv_blocks=10, max_model_len=-1).model.max_model_len == 320
    assert resolved(max_model_len=-1).model.max_model_len == 2048


def test_b036_weights_that_do_not_fit() -> None:
    with pytest.raises(MemoryBudgetError, match="weights need"):
        resolved(on=machine(available=100 << 20))


def test_the_remedy_is_for_what_takes_the_memory() -> None:
    with pytest.raises(MemoryBudgetError, match="Lower max_num_batched_tokens, max_num_seqs"):
        resolved(max_num_batched_tokens=10**9)
    with pytest.raises(MemoryBudgetError, match="smaller model or dtype"):
        resolve(
            EngineArgs(max_num_seqs=1, max_num_batched_tokens=1),
            path="model",
            config=CONFIG,
            tensor_shapes={"layers": (10**6, 10**5)},
            tensor_formats={"layers": "F32"},
            machine=machine(),
        )


def test_a_pool_that_does_not_fit() -> None:
    with pytest.raises(MemoryBudgetError, match="largest num_kv_blocks that fits is"):
        resolved(num_kv_blocks=10_000_000)
    with pytest.raises(MemoryBudgetError, match="no block"):
        resolved(kv_cache_memory_bytes=10)


def test_b037_more_threads_than_processors_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolved(num_threads=8, on=machine(cpus=1)).num_threads == 1
    assert "num_threads=8" in caplog.text


def test_more_running_requests_than_the_default_budget_raise_it() -> None:
    config = resolved(
        config=CONFIG | {"hidden_size": 8192, "num_attention_heads": 4}, max_num_seqs=100
    )
    assert config.scheduler.max_num_batched_tokens >= 100


def test_faster_kernels_get_a_larger_budget() -> None:
    large = CONFIG | {"hidden_size": 2048}
    budgets = [
        resolve(
            EngineArgs(dtype=dtype),
            path="model",
            config=large,
            tensor_shapes={"layers": (16_000, 10_000)},
            tensor_formats={"layers": "F32"},
            machine=Machine(2, 24 * GIB, 24 * GIB, isa=isa),
        ).scheduler.max_num_batched_tokens
        for dtype, isa in (("auto", "amx"), ("float32", "amx"), ("auto", "reference"))
    ]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > budgets[2]


def test_a_key_costs_its_part_of_a_tokens_products() -> None:
    config = resolved(config=CONFIG | {"num_attention_heads": 4, "head_dim": 32})
    doubled = resolved(config=CONFIG | {"num_attention_heads": 8, "head_dim": 32})
    assert config.scheduler.attention_cost > 0
    assert doubled.scheduler.attention_cost == 2 * config.scheduler.attention_cost
    assert resolved(enable_chunked_prefill=False).scheduler.attention_cost == 0
    assert resolved(on=gpu_machine()).scheduler.attention_cost == 0


def test_steps_in_which_others_decode_are_shorter_unless_their_size_is_set() -> None:
    def scheduler(num_values: int = 160_000_000, **settings: object) -> SchedulerConfig:
        return resolve(
            EngineArgs(**settings),
            path="model",
            config=CONFIG,
            tensor_shapes={"layers": (num_values // 10_000, 10_000)},
            tensor_formats={"layers": "BF16"},
            machine=Machine(2, 24 * GIB, 24 * GIB, isa="avx512"),
        ).scheduler

    shared = scheduler()
    assert 64 < shared.shared_tokens < shared.max_num_batched_tokens
    assert scheduler(max_num_batched_tokens=512).shared_tokens == 0
    assert scheduler(enable_chunked_prefill=False).shared_tokens == 0
    assert 1 <= scheduler(num_values=4_000_000_000).shared_tokens < 8
    assert resolved(on=gpu_machine()).scheduler.shared_tokens == 0


def test_without_chunking_a_step_holds_the_longest_prompt() -> None:
    config = resolved(enable_chunked_prefill=False)
    assert config.scheduler.max_num_batched_tokens >= 2048


def test_overrides_take_json_text() -> None:
    config = resolved(hf_overrides={"rope_scaling": '{"type": "linear", "factor": 2.0}'})
    assert config.model.max_model_len == 4096
    assert config.model.hf_config["rope_scaling"] == {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}),
        ({"rope_theta": 7e5}, {"rope_type": "linear", "factor": 2, "rope_theta": 7e5}),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 3}},
            {"rope_type": "dynamic", "factor": 3, "rope_theta": 5e5},
        ),
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
    ],
)
def test_b109_an_override_under_an_older_name_holds(
    overrides: dict[str, Any], expected: dict[str, Any]
) -> None:
    newer = {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}}
    config = resolved(CONFIG | newer, hf_overrides=overrides)
    assert rope_parameters(config.model.hf_config) == expected


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4}}, 8192),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, 2048),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4,
                    "original_max_position_embeddings": 1024,
                }
            },
            4096,
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 2048),
        ({"rope_scaling": None}, 2048),
    ],
)
def test_b109_context_length_with_rope_scaling(rope: dict[str, Any], length: int) -> None:
    assert read_parameters(CONFIG | rope).max_context == length


def test_b109_rope_settings_have_one_set_of_names() -> None:
    old = rope_parameters({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}})
    new = rope_parameters(
        {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}}
    )
    assert old == new == {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}
    assert rope_parameters({}) == {"rope_type": "default", "rope_theta": 10_000.0}
    with pytest.raises(ConfigError, match="rope_scaling"):
        rope_parameters({"rope_scaling": [1]})


def test_the_ledger_adds_up_and_shows_its_lines() -> None:
    ledger = resolved().ledger
    parts = ledger.weights + ledger.workspace + ledger.reserve + ledger.kv_pool + ledger.left
    assert parts == ledger.available
    text = render(ledger)
    for line in ("available", "weights", "workspace", "reserve", "KV pool", "left", "tokens"):
        assert line in text


def test_the_summary_says_what_a_user_wants_to_know() -> None:
    line = summary(resolved(num_kv_blocks=100, max_model_len=1024, num_threads=1))
    for part in ("smollm2-135m", "bfloat16", "reference kernels", "1 thread", "1,024", "3,200"):
        assert part in line
    assert "\n" not in line


def test_block_types_keep_their_codes_on_the_native_kernels_only() -> None:
    shapes = {"a": (32, 64), "b": (10, 32), "c": (7,)}
    formats = {"a": "Q4_1", "b": "IQ2_XS", "c": "F32"}
    packed = Weights(shapes, formats, "bfloat16", keeps_blocks=True)
    plain = Weights(shapes, formats, "bfloat16", keeps_blocks=False)
    assert packed.num_values == plain.num_values == 32 * 64 + 10 * 32 + 7
    assert packed.num_bytes == 64 * 20 + 2 * (10 * 32 + 7)
    assert plain.num_bytes == 2 * plain.num_values


def test_a_gpu_is_taken_where_there_is_one() -> None:
    config = resolved(on=gpu_machine())
    assert (config.device, config.kernels, config.exact) == ("cuda", "triton", True)
    assert config.ledger.available == 100 * GIB
    assert config.scheduler.max_steps_in_flight == 2
    assert {reason.setting: reason.why for reason in config.reasons}["device"] == "NVIDIA H200"
    assert "on the GPU" in summary(config)


def test_the_cpu_may_be_asked_for_beside_a_gpu() -> None:
    config = resolved(on=gpu_machine(), device="cpu", exact=False)
    assert (config.device, config.exact) == ("cpu", True)
    assert config.ledger.available == 4 * GIB
    assert config.scheduler.max_steps_in_flight == 1


def test_a_gpus_kv_cache_takes_more_of_what_is_left() -> None:
    on_gpu = resolved(
        on=gpu_machine(free=4 * GIB), max_num_seqs=10_000, max_num_batched_tokens=10_000
    )
    assert on_gpu.ledger.left < 0.11 * (on_gpu.ledger.left + on_gpu.ledger.kv_pool)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "cuda"}, "device='cuda' cannot be used: no driver. Use device='cpu'"),
        ({"device": "cdua"}, "Did you mean 'cuda'"),
    ],
)
def test_devices_that_are_not_there(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(on=dataclasses.replace(machine(), no_accelerator="no driver"), **settings)
    assert words in str(caught.value)


@pytest.mark.parametrize(("quantization", "bytes_per_value"), [("fp8", 1.001), ("int4", 0.625)])
def test_quantized_matrices_take_less_memory(quantization: str, bytes_per_value: float) -> None:
    plain = resolved(on=gpu_machine())
    small = resolved(on=gpu_machine(), quantization=quantization)
    assert small.quantization == quantization
    num_values = sum(a * b for a, b in SHAPES.values())
    assert plain.ledger.weights == 2 * num_values
    assert small.ledger.weights == pytest.approx(bytes_per_value * num_values, rel=1e-3)


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8.5), ("int4", 5)])
def test_on_the_native_kernels_the_vocabulary_has_eight_bits(
    quantization: str, bits: float
) -> None:
    shapes = {"model.embed_tokens.weight": (100, 64), "a": (50, 96), "odd": (8, 33), "b": (96,)}
    weights = Weights(
        shapes,
        dict.fromkeys(shapes, "BF16"),
        "bfloat16",
        keeps_blocks=True,
        quantization=quantization,
    )
    assert weights.num_bytes == 100 * 64 * 8.5 / 8 + 50 * 96 * bits / 8 + 2 * (8 * 33 + 96)
    native = dataclasses.replace(machine(), isa="avx512")
    assert resolved(on=native, quantization=quantization).quantization == quantization
    with pytest.raises(ConfigError, match="native kernels"):
        resolved(quantization=quantization, device="cpu")
    with pytest.raises(ConfigError, match=r"int8.*device='cpu'"):
        resolved(on=gpu_machine(), quantization="int8")


def test_routers_have_eight_bits_and_experts_in_one_tensor_have_four() -> None:
    shapes = {
        "model.layers.0.mlp.gate.weight": (8, 64),
        "model.layers.0.mlp.router.weight": (8, 64),
        "model.layers.0.mlp.experts.3.gate_proj.weight": (32, 64),
        "model.layers.0.mlp.experts.down_proj": (4, 96, 64),
    }
    weights = Weights(
        shapes,
        dict.fromkeys(shapes, "BF16"),
        "bfloat16",
        keeps_blocks=True,
        quantization="int4",
    )
    assert weights.num_bytes == 2 * 8 * 64 * 8.5 / 8 + (32 * 64 + 4 * 96 * 64) * 5 / 8


def test_codes_in_tensors_of_their_own_count_as_their_values() -> None:
    shapes = {"experts.down_proj_blocks": (4, 64, 3, 16), "experts.down_proj_scales": (4, 64, 3)}
    formats = dict.fromkeys(shapes, "U8")
    kept = Weights(shapes, formats, "bfloat16", keeps_blocks=True)
    expanded = Weights(shapes, formats, "bfloat16", keeps_blocks=False)
    assert kept.num_values == expanded.num_values == 4 * 64 * 96
    assert kept.num_bytes == 4 * 64 * 3 * 18
    assert expanded.num_bytes == 2 * 4 * 64 * 96
    on_gpu = dataclasses.replace(expanded, keeps_mxfp4=True)
    assert on_gpu.num_values == expanded.num_values
    assert on_gpu.num_bytes == 4 * 64 * 3 * 17


def test_a_gpu_keeps_codes_for_bfloat16_only() -> None:
    shapes = {"experts.down_proj_blocks": (4, 64, 3, 16), "experts.down_proj_scales": (4, 64, 3)}
    given = shapes, dict.fromkeys(shapes, "U8"), None, "cuda"
    assert held_weights(*given, "bfloat16", "triton").num_bytes == 4 * 64 * 3 * 17
    assert held_weights(*given, "float32", "triton").num_bytes == 4 * 4 * 64 * 96


def test_packed_tensors_count_as_their_block_types() -> None:
    weights = Weights({"a": (40, 64)}, {"a": "packed Q4_1"}, "bfloat16", keeps_blocks=True)
    assert weights.num_bytes == 40 * 2 * 20


def test_a_float8_cache_is_half_a_bfloat16_one() -> None:
    plain = resolved(on=gpu_machine(), num_kv_blocks=100)
    small = resolved(on=gpu_machine(), num_kv_blocks=100, kv_cache_dtype="fp8")
    assert small.cache.dtype == "float8_e4m3fn"
    assert small.ledger.kv_pool * 2 == plain.ledger.kv_pool


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "fp9"}, "quantization='fp9' is not one of: fp8, int8, int4."),
        ({"quantization": "fp8", "device": "cpu"}, "quantization='fp8' needs device='cuda'"),
        ({"quantization": "int4", "dtype": "float32"}, "dtype='float32'"),
        ({"kv_cache_dtype": "fp8", "device": "cpu"}, "which only a GPU can do"),
        ({"kv_cache_dtype": "int8"}, "native kernels of a CPU can do"),
    ],
)
def test_formats_that_another_device_has(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(on=gpu_machine(), **settings)
    assert words in str(caught.value)
