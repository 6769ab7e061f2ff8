"""From what a user set to what the engine runs with.

The only place where "choose for me" becomes a value. Every such choice leaves a `Reason`; every
setting that cannot work is refused with the nearest one that does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from tokenmill.checkpoint.nested_config import with_overridden_parts
from tokenmill.config.argument_types import at_least, one_of
from tokenmill.config.choices import Choices
from tokenmill.config.device import (
    DEFAULTS,
    DeviceDefaults,
    choose_device,
    choose_exact,
    choose_kernels,
    flops_per_second,
)
from tokenmill.config.draft_head import check_target
from tokenmill.config.draft_model import DraftFiles, beside_draft, resolve_draft, with_draft
from tokenmill.config.dtypes import canonical_dtype
from tokenmill.config.encoder import read_tensors, resolve_encoder, takes_images, with_encoder
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import (
    LOGPROBS_MODES,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    PoolingConfig,
    SamplingConfig,
)
from tokenmill.config.kv_cache_dtype import choose_kv_dtype
from tokenmill.config.kv_events import resolve_kv_events
from tokenmill.config.kv_layout import kv_layout
from tokenmill.config.kv_pool import PoolSize, size_pool
from tokenmill.config.kv_transfer import resolve_kv_transfer
from tokenmill.config.lora import resolve_lora
from tokenmill.config.machine import Machine
from tokenmill.config.memory import Weights, empty_ledger
from tokenmill.config.multimodal import resolve_multimodal
from tokenmill.config.parallel import ParallelConfig
from tokenmill.config.parameters import ModelParameters, read_parameters
from tokenmill.config.pooling import resolve_pooling
from tokenmill.config.quantization import held_weights
from tokenmill.config.ranks import check_quantized_parts, rank_share, resolve_parallel
from tokenmill.config.scheduling import Sizing, scheduler_config, step_shape
from tokenmill.config.sleep import resolve_sleep_mode
from tokenmill.config.speculation import SpeculativeConfig, max_drafts, resolve_speculation
from tokenmill.config.structured_outputs import read_structured_outputs_config
from tokenmill.errors import ConfigError
from tokenmill.tokenizer.reasoning import check_reasoning_parser

logger = logging.getLogger(__name__)

MAX_BLOCK_SIZE = 256


_BESIDE_ROPE_SCALING = {"rope_theta", "partial_rotary_factor"}
"""Settings of RoPE that are no scaling; older files have them beside `rope_scaling`."""


def resolve(
    args: EngineArgs,
    *,
    path: str,
    config: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    tensor_formats: Mapping[str, str],
    machine: Machine,
    implementation: str = "tokenmill",
    draft: DraftFiles | None = None,
) -> EngineConfig:
    """Settle every setting; `config` and the tensors are those of the files at `path`.

    Raises `ConfigError`, and `MemoryBudgetError` where it does not fit `machine`.
    """
    choices = Choices()
    hf_config = apply_overrides(config, args.hf_overrides)
    pooling, parameters, speculation, args = _kind(args, hf_config, path, implementation)
    device = _device(args, machine, choices)
    parallel = resolve_parallel(args, hf_config, parameters, implementation, device)
    rank = rank_share(parallel, machine, parameters, _read(args, hf_config, tensor_shapes))
    machine, parameters, tensor_shapes = rank.machine, rank.parameters, rank.tensor_shapes
    defaults = DEFAULTS[device]
    dtype = _dtype(args, device, choices)
    lora = resolve_lora(args, dtype, device)
    block_size = _block_size(args, defaults, choices)
    num_threads = _num_threads(args, machine, choices)
    max_model_len = _max_model_len(args, parameters, choices)
    kernels = choose_kernels(device, dtype, machine)
    weights = held_weights(tensor_shapes, tensor_formats, args.quantization, device, dtype, kernels)
    check_quantized_parts(weights.quantization, parameters, parallel)
    kv_dtype = _kv_dtype(args, weights, parameters, kernels, block_size, choices)
    sizing = Sizing(weights, parameters, flops_per_second(kernels, num_threads), defaults)
    step = step_shape(args, hf_config, sizing, max_model_len, max_drafts(speculation), choices)
    speculation = resolve_draft(speculation, draft, parameters, step, dtype, kernels, parallel)
    layout = kv_layout(hf_config, parameters, implementation, step, block_size, kv_dtype)
    encoder = None if pooling else resolve_encoder(args, hf_config, implementation, device, step)
    ledger = empty_ledger(machine, weights, parameters, step, device, lora)
    ledger = with_encoder(with_draft(ledger, speculation, step), encoder, parameters, dtype)
    layout = beside_draft(layout.spread_over(parallel.pipeline_parallel_size), speculation)
    pool = size_pool(args, step, layout, ledger, defaults.kv_cache_memory_fraction)
    max_model_len = _what_fits(max_model_len, pool, choices)
    return EngineConfig(
        model=_model(args, path, hf_config, parameters, dtype, max_model_len, pooling),
        cache=CacheConfig(block_size, pool.num_blocks, args.enable_prefix_caching, kv_dtype),
        scheduler=scheduler_config(args, sizing, step, max_model_len),
        device=device,
        exact=choose_exact(args, device),
        quantization=weights.quantization,
        kernels=kernels,
        num_threads=num_threads,
        ledger=pool.ledger,
        speculation=speculation,
        lora=lora,
        encoder=encoder,
        kv_transfer=resolve_kv_transfer(args, device, speculation, pools=pooling is not None),
        parallel=parallel,
        **_by_themselves(args, device, parallel),
        reasons=tuple(choices.reasons),
    )


def _by_themselves(args: EngineArgs, device: str, parallel: ParallelConfig) -> dict[str, Any]:
    """Fields of `EngineConfig` that depend on little else."""
    return {
        "enable_sleep_mode": resolve_sleep_mode(args, device, parallel),
        "attention_backend": args.attention_backend,
        "graphs": _graphs(args),
        "max_logprobs": at_least("max_logprobs", args.max_logprobs, -1),
        "sampling": _sampling(args),
        "seed": args.seed,
        "reasoning_parser": check_reasoning_parser(args.reasoning_parser),
        "structured_outputs": read_structured_outputs_config(args.structured_outputs_config),
        "multimodal": resolve_multimodal(args),
        "kv_events": resolve_kv_events(args),
        "data_parallel_size": at_least("data_parallel_size", args.data_parallel_size, 1),
    }


def _kind(
    args: EngineArgs, hf_config: Mapping[str, Any], path: str, implementation: str
) -> tuple[PoolingConfig | None, ModelParameters, SpeculativeConfig | None, EngineArgs]:
    """How the model pools, if it does; its sizes; how it drafts; and the settings that follow."""
    parameters = read_parameters(hf_config, caches_latents=implementation == "tokenmill")
    pooling, args = resolve_pooling(args, hf_config, parameters, path)
    speculation, args = resolve_speculation(args, parameters, pools=pooling is not None)
    check_target(args, speculation, parameters, implementation)
    return pooling, parameters, speculation, args


def _read(
    args: EngineArgs, hf_config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, tuple[int, ...]]:
    return read_tensors(shapes, hf_config, takes_images=takes_images(args))


def _sampling(args: EngineArgs) -> SamplingConfig:
    return SamplingConfig(
        logprobs_mode=one_of("logprobs_mode", args.logprobs_mode, LOGPROBS_MODES),
        logits_processors=tuple(args.logits_processors),
        stream_interval=at_least("stream_interval", args.stream_interval, 1),
    )


def apply_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `overrides` laid over it; values given as JSON text are parsed."""
    merged = dict(config)
    for key, value in overrides.items():
        if isinstance(value, str) and value[:1] in "{[":
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise ConfigError(f"hf_overrides: {key} is not valid JSON: {error}.") from error
        merged[key] = value
    return _with_rope_overrides(with_overridden_parts(config, merged), overrides)


def _with_rope_overrides(merged: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Newer files keep in `rope_parameters` what has names of its own in older ones; an override
    under an older name holds there, too.
    """
    rope = merged.get("rope_parameters")
    if "rope_parameters" in overrides or not isinstance(rope, Mapping):
        return merged
    kept = set(rope)
    if "rope_scaling" in overrides:  # replaces the file's as a whole
        kept &= _BESIDE_ROPE_SCALING
    kept -= _BESIDE_ROPE_SCALING & set(overrides)
    return {**merged, "rope_parameters": {key: rope[key] for key in rope if key in kept}}


def _dtype(args: EngineArgs, device: str, choices: Choices) -> str:
    if args.dtype != "auto":
        return canonical_dtype(args.dtype)
    place = "a CPU" if device == "cpu" else "a GPU"
    return choices.choose(
        "dtype", "bfloat16", f"half the bytes of float32, and the fastest type on {place}"
    )


def _kv_dtype(
    args: EngineArgs,
    weights: Weights,
    parameters: ModelParameters,
    kernels: str,
    block_size: int,
    choices: Choices,
) -> str:
    kv_dtype, why = choose_kv_dtype(args, weights, parameters, kernels, block_size)
    return kv_dtype if why is None else choices.choose("kv_cache_dtype", kv_dtype, why)


def _block_size(args: EngineArgs, defaults: DeviceDefaults, choices: Choices) -> int:
    size = args.block_size
    if size is None:
        return choices.choose("block_size", defaults.block_size, "fits the tiles of the kernels")
    if size < 1 or size > MAX_BLOCK_SIZE or size & (size - 1):
        powers = [1 << exponent for exponent in range(MAX_BLOCK_SIZE.bit_length())]
        nearest = min(powers, key=lambda power: abs(power - size))
        raise ConfigError(
            f"block_size={size} must be a power of two from 1 to {MAX_BLOCK_SIZE};"
            f" the nearest is {nearest}."
        )
    return size


def _num_threads(args: EngineArgs, machine: Machine, choices: Choices) -> int:
    if args.num_threads is None:
        return choices.choose(
            "num_threads", machine.num_cpus, "processors this process may use (affinity, quota)"
        )
    wanted = at_least("num_threads", args.num_threads, 1)
    if wanted > machine.num_cpus:
        logger.warning(
            "num_threads=%d, but this process may use %d processors; using %d.",
            wanted,
            machine.num_cpus,
            machine.num_cpus,
        )
    return min(wanted, machine.num_cpus)


def _max_model_len(args: EngineArgs, parameters: ModelParameters, choices: Choices) -> int:
    """The length asked for, at most the model's own; -1 and None start from that."""
    longest = parameters.max_context
    wanted = args.max_model_len
    if wanted is None or wanted == -1:
        return choices.choose("max_model_len", longest, "the model's own context length")
    if not 2 <= wanted <= longest:
        raise ConfigError(
            f"max_model_len={wanted} must lie between 2 and the model's context length,"
            f" {longest}. If the model was made for more, set max_position_embeddings with"
            f" hf_overrides."
        )
    return wanted


def _model(
    args: EngineArgs,
    path: str,
    hf_config: Mapping[str, Any],
    parameters: ModelParameters,
    dtype: str,
    max_model_len: int,
    pooling: PoolingConfig | None,
) -> ModelConfig:
    return ModelConfig(
        name=args.model,
        path=path,
        architecture=parameters.architecture,
        hf_config=hf_config,
        dtype=dtype,
        max_model_len=max_model_len,
        vocab_size=parameters.vocab_size,
        pooling=pooling,
        takes_images=takes_images(args),
    )


def _what_fits(max_model_len: int, pool: PoolSize, choices: Choices) -> int:
    if pool.max_model_len == max_model_len:
        return max_model_len
    return choices.choose("max_model_len", pool.max_model_len, "what the KV cache holds")


def _graphs(args: EngineArgs) -> str:
    if args.enforce_eager and args.check_graphs:
        raise ConfigError("check_graphs=True compares recorded steps; enforce_eager=True has none.")
    if args.enforce_eager:
        return "off"
    return "check" if args.check_graphs else "replay"


def _device(args: EngineArgs, machine: Machine, choices: Choices) -> str:
    device, why = choose_device(args, machine)
    return device if why is None else choices.choose("device", device, why)
