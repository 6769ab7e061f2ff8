"""From what a user set to what the engine runs with.

The only place where "choose for me" becomes a value. Every such choice leaves a `Reason`; every
setting that cannot work is refused with the nearest one that does.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tokenmill.config.device import (
    DEFAULTS,
    DeviceDefaults,
    choose_device,
    choose_exact,
    choose_kernels,
    flops_per_second,
)
from tokenmill.config.draft_model import DraftFiles, beside_draft, resolve_draft, with_draft
from tokenmill.config.dtypes import canonical_dtype
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import (
    LOGPROBS_MODES,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    PoolingConfig,
    Reason,
    SamplingConfig,
    SchedulerConfig,
)
from tokenmill.config.kv_cache_dtype import choose_kv_dtype
from tokenmill.config.kv_layout import kv_layout
from tokenmill.config.kv_pool import PoolSize, size_pool
from tokenmill.config.lora import resolve_lora
from tokenmill.config.machine import Machine
from tokenmill.config.memory import StepShape, Weights, empty_ledger
from tokenmill.config.multimodal import resolve_multimodal
from tokenmill.config.parameters import ModelParameters, at_least, one_of, read_parameters
from tokenmill.config.pooling import resolve_pooling
from tokenmill.config.quantization import held_weights
from tokenmill.config.speculation import SpeculativeConfig, max_drafts, resolve_speculation
from tokenmill.config.structured_outputs import read_structured_outputs_config
from tokenmill.errors import ConfigError, did_you_mean
from tokenmill.tokenizer.reasoning import check_reasoning_parser

T = TypeVar("T", int, str)

logger = logging.getLogger(__name__)

POLICIES = ("fcfs", "priority")
MAX_BLOCK_SIZE = 256
STEP_SECONDS = 0.1
"""A step should stay under this, so that a request which comes meanwhile does not wait for long.
Steps in which requests decode have a limit of their own, `DeviceDefaults.shared_step_seconds`."""
MIN_BUDGET = 64


_BESIDE_ROPE_SCALING = {"rope_theta", "partial_rotary_factor"}
"""Settings of RoPE that are no scaling; older files have them beside `rope_scaling`."""


@dataclass(slots=True)
class _Choices:
    """Collects the reasons while settings are resolved."""

    reasons: list[Reason] = field(default_factory=list)

    def choose(self, setting: str, value: T, why: str) -> T:
        self.reasons.append(Reason(setting, str(value), why))
        return value


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
    """Settle every setting; `config` and the tensors are those of the files at `path`, on the code
    of `implementation`. Raises `ConfigError`, `MemoryBudgetError` where it does not fit `machine`.
    """
    choices = _Choices()
    hf_config = apply_overrides(config, args.hf_overrides)
    pooling, parameters, speculation, args = _kind(args, hf_config, path, implementation)
    device = _device(args, machine, choices)
    defaults = DEFAULTS[device]
    dtype = _dtype(args, device, choices)
    lora = resolve_lora(args, dtype, device)
    block_size = _block_size(args, defaults, choices)
    num_threads = _num_threads(args, machine, choices)
    max_model_len = _max_model_len(args, parameters, choices)
    kernels = choose_kernels(device, dtype, machine)
    weights = held_weights(tensor_shapes, tensor_formats, args.quantization, device, dtype, kernels)
    kv_dtype = _kv_dtype(args, weights, parameters, kernels, block_size, choices)
    flops = flops_per_second(kernels, num_threads)
    budget = _token_budget(args, weights, parameters, flops, defaults, choices)
    step = _step(args, budget, max_model_len, speculation, defaults, choices)
    speculation = resolve_draft(speculation, draft, parameters, step, dtype=dtype, kernels=kernels)
    layout = kv_layout(hf_config, parameters, implementation, step, block_size, kv_dtype)
    ledger = empty_ledger(machine, weights, parameters, step, device, lora)
    ledger = with_draft(ledger, speculation, step)
    layout = beside_draft(layout, speculation)
    pool = size_pool(args, step, layout, ledger, defaults.kv_cache_memory_fraction)
    max_model_len = _what_fits(max_model_len, pool, choices)
    return EngineConfig(
        model=_model(args, path, hf_config, parameters, dtype, max_model_len, pooling),
        cache=CacheConfig(block_size, pool.num_blocks, args.enable_prefix_caching, kv_dtype),
        scheduler=_scheduler(args, step, max_model_len, defaults, weights, parameters, flops),
        device=device,
        exact=choose_exact(args, device),
        quantization=weights.quantization,
        attention_backend=args.attention_backend,
        kernels=kernels,
        graphs=_graphs(args),
        num_threads=num_threads,
        max_logprobs=at_least("max_logprobs", args.max_logprobs, -1),
        sampling=_sampling(args),
        seed=args.seed,
        ledger=pool.ledger,
        reasoning_parser=check_reasoning_parser(args.reasoning_parser),
        structured_outputs=read_structured_outputs_config(args.structured_outputs_config),
        speculation=speculation,
        lora=lora,
        multimodal=resolve_multimodal(args),
        data_parallel_size=at_least("data_parallel_size", args.data_parallel_size, 1),
        reasons=tuple(choices.reasons),
    )


def _step(
    args: EngineArgs,
    budget: int,
    max_model_len: int,
    speculation: SpeculativeConfig | None,
    defaults: DeviceDefaults,
    choices: _Choices,
) -> StepShape:
    max_num_seqs = _max_num_seqs(args, budget, defaults, choices)
    return StepShape(max_num_seqs, budget, max_model_len, max_drafts(speculation))


def _kind(
    args: EngineArgs, hf_config: Mapping[str, Any], path: str, implementation: str
) -> tuple[PoolingConfig | None, ModelParameters, SpeculativeConfig | None, EngineArgs]:
    """How the model pools, if it does; its sizes; how it drafts; and the settings that follow."""
    parameters = read_parameters(hf_config, caches_latents=implementation == "tokenmill")
    pooling, args = resolve_pooling(args, hf_config, parameters, path)
    speculation, args = resolve_speculation(args, parameters, pools=pooling is not None)
    return pooling, parameters, speculation, args


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
    return _with_rope_overrides(merged, overrides)


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


def _dtype(args: EngineArgs, device: str, choices: _Choices) -> str:
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
    choices: _Choices,
) -> str:
    kv_dtype, why = choose_kv_dtype(args, weights, parameters, kernels, block_size)
    return kv_dtype if why is None else choices.choose("kv_cache_dtype", kv_dtype, why)


def _block_size(args: EngineArgs, defaults: DeviceDefaults, choices: _Choices) -> int:
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


def _num_threads(args: EngineArgs, machine: Machine, choices: _Choices) -> int:
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


def _max_model_len(args: EngineArgs, parameters: ModelParameters, choices: _Choices) -> int:
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
    )


def _what_fits(max_model_len: int, pool: PoolSize, choices: _Choices) -> int:
    if pool.max_model_len == max_model_len:
        return max_model_len
    return choices.choose("max_model_len", pool.max_model_len, "what the KV cache holds")


def _token_budget(
    args: EngineArgs,
    weights: Weights,
    parameters: ModelParameters,
    flops: float,
    defaults: DeviceDefaults,
    choices: _Choices,
) -> int:
    """Tokens of a step, for a machine that computes `flops` a second."""
    if args.max_num_batched_tokens is not None:
        budget = at_least("max_num_batched_tokens", args.max_num_batched_tokens, 1)
        if args.max_num_seqs is not None and budget < args.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={budget} is less than max_num_seqs={args.max_num_seqs},"
                f" but every running request needs a token of the step; raise it to"
                f" {args.max_num_seqs}, or lower max_num_seqs to {budget}."
            )
    else:
        fitting = int(STEP_SECONDS * flops / _ops_per_token(weights, parameters)) // 32 * 32
        budget = max(
            min(fitting, defaults.max_num_batched_tokens), MIN_BUDGET, args.max_num_seqs or 0
        )
        budget = choices.choose(
            "max_num_batched_tokens", budget, f"a step takes about {STEP_SECONDS * 1e3:.0f} ms"
        )
    if not args.enable_chunked_prefill and budget < parameters.max_context:
        length = args.max_model_len or parameters.max_context
        if budget < length and args.max_num_batched_tokens is not None:
            raise ConfigError(
                f"max_num_batched_tokens={budget} is less than max_model_len={length}, which"
                f" enable_chunked_prefill=False needs; raise it to {length}."
            )
        budget = max(budget, length)
    return budget


def _ops_per_token(weights: Weights, parameters: ModelParameters) -> int:
    """Of the products in all layers."""
    return 2 * max(weights.num_values - parameters.vocab_size * parameters.hidden_size, 1)


def _max_num_seqs(
    args: EngineArgs, budget: int, defaults: DeviceDefaults, choices: _Choices
) -> int:
    if args.max_num_seqs is not None:
        return at_least("max_num_seqs", args.max_num_seqs, 1)
    return choices.choose(
        "max_num_seqs", min(defaults.max_num_seqs, budget), "each takes a token of a step"
    )


def _graphs(args: EngineArgs) -> str:
    if args.enforce_eager and args.check_graphs:
        raise ConfigError("check_graphs=True compares recorded steps; enforce_eager=True has none.")
    if args.enforce_eager:
        return "off"
    return "check" if args.check_graphs else "replay"


def _device(args: EngineArgs, machine: Machine, choices: _Choices) -> str:
    device, why = choose_device(args, machine)
    return device if why is None else choices.choose("device", device, why)


def _scheduler(
    args: EngineArgs,
    step: StepShape,
    max_model_len: int,
    defaults: DeviceDefaults,
    weights: Weights,
    parameters: ModelParameters,
    flops: float,
) -> SchedulerConfig:
    ahead = args.async_scheduling
    if ahead is None:
        ahead = defaults.async_scheduling
    if args.scheduling_policy not in POLICIES:
        raise ConfigError(
            f"scheduling_policy={args.scheduling_policy!r} is not one of: {', '.join(POLICIES)}."
            f"{did_you_mean(args.scheduling_policy, POLICIES)}"
        )
    threshold = args.long_prefill_token_threshold
    if not 0 <= threshold <= max_model_len:
        raise ConfigError(
            f"long_prefill_token_threshold={threshold} must lie between 0 (off) and"
            f" max_model_len, {max_model_len}."
        )
    attention_cost, shared_tokens = 0.0, 0
    if args.enable_chunked_prefill:
        ops_per_token = _ops_per_token(weights, parameters)
        ops_per_key = 4 * parameters.num_heads * parameters.head_size
        attention_cost = defaults.attention_slowness * ops_per_key / ops_per_token
        if args.max_num_batched_tokens is None:  # else somebody has said what a step takes
            shared_tokens = math.ceil(defaults.shared_step_seconds * flops / ops_per_token)
    return SchedulerConfig(
        max_num_seqs=step.max_num_seqs,
        max_num_batched_tokens=step.max_num_batched_tokens,
        max_model_len=max_model_len,
        long_prefill_token_threshold=threshold,
        enable_chunked_prefill=args.enable_chunked_prefill,
        policy=args.scheduling_policy,
        max_steps_in_flight=2 if ahead else 1,
        attention_cost=attention_cost,
        shared_tokens=shared_tokens,
    )
