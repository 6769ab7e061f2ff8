"""The worker of a GPU: what `build.py` makes for a CPU, from the parts that a GPU needs.

Memory is planned by arithmetic (`config/memory.py`) and then measured: after the weights are in
place, one blank step of the largest size shows what a step takes, and the KV pool gets no more than
what is left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import torch

from tokenmill.checkpoint.checkpoint import Checkpoint
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.memory import GPU_RESERVE_BYTES, format_bytes
from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.errors import ConfigError, MemoryBudgetError
from tokenmill.features.kv_transfer.build import build_kv_transfer
from tokenmill.features.lora.build import OnGpu, build_adapters
from tokenmill.features.spec.build import build_drafter
from tokenmill.features.spec.draft_model import DraftLimits
from tokenmill.layers.gpu import GpuKernels, WeightFormat
from tokenmill.models.base import CausalLM
from tokenmill.models.loader import load_model
from tokenmill.sampling.gpu import GpuSampler
from tokenmill.sampling.logprobs import LogprobsMode
from tokenmill.worker.adapters import RowAdapters
from tokenmill.worker.attention_groups import num_kv_groups
from tokenmill.worker.bind import bind_attention
from tokenmill.worker.draft_model import cache_of_draft, config_of_draft, limits_of_drafts
from tokenmill.worker.drafts import Drafter
from tokenmill.worker.graphs.cuda import CudaGraphRecorder, GraphSizes
from tokenmill.worker.graphs.forward import checked
from tokenmill.worker.inputs.device import DeviceInputs
from tokenmill.worker.inputs.multimodal_device import MultiModalDeviceInputs
from tokenmill.worker.inputs.staging import Results, Staging
from tokenmill.worker.kv_cache import kv_cache_config
from tokenmill.worker.limits import RunnerLimits
from tokenmill.worker.model_runner import ModelRunner
from tokenmill.worker.pooling.pooler import Pooler
from tokenmill.worker.pooling.runner import EncoderRunner, PoolingRunner
from tokenmill.worker.results import finish_later
from tokenmill.worker.row_params import build_row_params
from tokenmill.worker.worker import Worker

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Draft = tuple[EngineConfig, CausalLM]
"""A model that drafts, and the engine's settings with it in place of the other one."""
LOGITS_SLAB = 1024
"""Rows of logits computed at once: each slab reads the head's weights once."""
STAGES = (
    "update_states", "execute_model", "sample_tokens", "_prepare_inputs",
    "_build_attention_metadata", "_forward", "_compute_logits", "_sample", "_commit", "_finish",
)  # fmt: skip
"""Methods of the runner that are shown as ranges in a profile of the device."""


def build_gpu_worker(
    config: EngineConfig, checkpoint: Checkpoint, on_progress: Callable[[int, int], None]
) -> Worker:
    """Load the model onto the GPU, size and allocate its KV cache, and capture its steps.

    Raises `ConfigError` if torch sees no GPU, `MemoryBudgetError` if the KV cache finds no room,
    and what `build_worker` raises.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device='cuda': torch {torch.__version__} sees no GPU. Install a build of torch for"
            " CUDA that the driver supports, or use device='cpu'."
        )
    device = torch.device("cuda", torch.cuda.current_device())
    model = load_gpu_model(config, checkpoint, device, on_progress)
    adapters = build_adapters(config, model, OnGpu(device, Staging(device).stage_into))
    draft = load_gpu_draft(config, device)
    weights = torch.cuda.memory_allocated(device)
    planned = kv_cache_config(config, model)
    smallest = replace(planned, num_blocks=2)
    step, block_bytes = _measure_step(config, model, smallest, device), planned.bytes_per_block
    if draft is not None:
        cache = cache_of_draft(*draft, smallest)
        step += _measure_step(*draft, cache, device)
        block_bytes += cache.bytes_per_block
    cache = _fit(planned, block_bytes, step + config.ledger.encoder_cache, device)
    drafter = build_drafter(config, partial(_draft_runner, draft, cache, device))
    runner = make_gpu_runner(config, model, cache, device, adapters, drafter)
    _annotate(runner)
    _capture(config, runner)
    _log_memory(config, cache, weights, step)
    return Worker(runner, cache, build_kv_transfer(config, model, cache, checkpoint))


def load_gpu_model(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> CausalLM:
    """The model on the kernels of a GPU. Raises what `load_model` raises."""
    weight_format = cast(WeightFormat, config.quantization or "plain")
    kernels = GpuKernels(device, exact=config.exact, weight_format=weight_format)
    return load_model(config.model, checkpoint, on_progress, kernels=kernels)


def load_gpu_draft(config: EngineConfig, device: torch.device) -> Draft | None:
    """The model that drafts, with its settings, if one does."""
    if config.speculation is None or config.speculation.draft is None:
        return None
    config = config_of_draft(config)
    return config, load_gpu_model(config, open_checkpoint(Path(config.model.path)), device)


def make_gpu_draft_runner(
    draft: Draft, target_cache: KVCacheConfig, device: torch.device
) -> tuple[ModelRunner, DraftLimits]:
    """A runner of the model that drafts, with K and V for each block of the other's pool.

    Raises `ConfigError` if no layer of the other model keeps all of a sequence.
    """
    config, model = draft
    cache = cache_of_draft(config, model, target_cache)
    limits = limits_of_drafts(config, cache, target_cache)
    return make_gpu_runner(config, model, cache, device), limits


def _draft_runner(
    draft: Draft | None, target_cache: KVCacheConfig, device: torch.device
) -> tuple[ModelRunner, DraftLimits]:
    assert draft is not None
    runner, limits = make_gpu_draft_runner(draft, target_cache, device)
    _capture(draft[0], runner)
    return runner, limits


def _capture(config: EngineConfig, runner: ModelRunner) -> None:
    """Capture a runner's steps, unless that is off, and compile whatever else they need."""
    pooling = config.model.pooling
    is_decoder = pooling is None or pooling.is_causal  # encoders take types beside ids
    if config.graphs != "off" and is_decoder and _can_be_captured(runner):
        record = CudaGraphRecorder(
            GraphSizes.default(
                config.scheduler.max_num_seqs,
                config.scheduler.max_num_batched_tokens,
                config.scheduler.max_model_len,
            )
        )
        runner.capture(checked(record) if config.graphs == "check" else record)
    runner.warm_up()


def _can_be_captured(runner: ModelRunner) -> bool:
    if runner.supports_graphs:
        return True
    logger.info("steps are not captured in CUDA graphs: the attention backend plans on the host")
    return False


def make_gpu_runner(
    config: EngineConfig,
    model: CausalLM,
    cache: KVCacheConfig,
    device: torch.device,
    adapters: RowAdapters | None = None,
    drafter: Drafter | None = None,
) -> ModelRunner:
    """A runner whose rows are mirrored on `device`, and whose results are finished later."""
    groups = bind_attention(config, model, cache, device)
    staging, results = Staging(device), Results(device)
    limits = RunnerLimits.of(config, LOGITS_SLAB)
    rows = limits.make_rows(num_kv_groups(groups))
    sizes = limits.max_num_batched_tokens, limits.max_num_seqs
    inputs = DeviceInputs(rows, *sizes, staging, device)
    if config.encoder is not None:
        inputs = MultiModalDeviceInputs(
            model, rows, *sizes, staging, device, is_bidirectional=config.encoder.is_bidirectional
        )
    pooling = config.model.pooling
    if pooling is not None:
        kind = PoolingRunner if pooling.is_causal else EncoderRunner
        pooler = Pooler(pooling, model)
        return kind(model, groups, limits, pooler, inputs=inputs, adapters=adapters)
    return ModelRunner(
        model,
        groups,
        limits,
        inputs=inputs,
        sampler=GpuSampler(
            staging.stage,
            results.fetch,
            max_num_rows=config.max_num_sampled,
            vocab_size=config.model.vocab_size,
            device=device,
            mode=LogprobsMode.named(config.sampling.logprobs_mode),
        ),
        row_params=build_row_params(config),
        adapters=adapters,
        drafter=drafter,
        hand_over=finish_later,
    )


def _measure_step(
    config: EngineConfig, model: CausalLM, cache: KVCacheConfig, device: torch.device
) -> int:
    """Bytes that the largest step takes while it runs, by running a blank one."""
    runner = make_gpu_runner(config, model, cache, device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.run_blank(runner.limits.largest_step)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _fit(
    planned: KVCacheConfig, block_bytes: int, step_bytes: int, device: torch.device
) -> KVCacheConfig:
    """The planned pool, or as much of it as the measured memory allows.

    A block takes `block_bytes`, those of the model that drafts included.
    """
    if not planned.token_groups:  # states are all that is kept, and have their memory by now
        return planned
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    room = free - step_bytes - GPU_RESERVE_BYTES
    num_blocks = min(planned.num_blocks, room // block_bytes)
    if num_blocks < 2:
        raise MemoryBudgetError(
            f"The GPU has {format_bytes(free)} free beside the weights; a step takes"
            f" {format_bytes(step_bytes)}, the reserve {format_bytes(GPU_RESERVE_BYTES)}, and the"
            f" KV cache needs at least {format_bytes(2 * block_bytes)}. Lower"
            f" max_num_batched_tokens or max_num_seqs."
        )
    if num_blocks < planned.num_blocks:
        logger.warning(
            "The KV cache gets %d of the %d blocks planned: a step takes %s.",
            num_blocks,
            planned.num_blocks,
            format_bytes(step_bytes),
        )
    return replace(planned, num_blocks=num_blocks)


def _log_memory(config: EngineConfig, cache: KVCacheConfig, weights: int, step: int) -> None:
    free, total = torch.cuda.mem_get_info()
    logger.info(
        "GPU memory, measured: weights %s, a step %s (planned %s), KV cache %s for %d tokens,"
        " free %s of %s",
        format_bytes(weights),
        format_bytes(step),
        format_bytes(config.ledger.workspace),
        format_bytes(cache.num_blocks * cache.bytes_per_block),
        cache.num_usable_tokens if cache.token_groups else 0,
        format_bytes(free),
        format_bytes(total),
    )


def _annotate(runner: ModelRunner) -> None:
    """Show the runner's stages as ranges in profiles; outside a profile they cost nothing to speak
    of.
    """
    for name in STAGES:
        setattr(runner, name, _ranged(name.lstrip("_"), getattr(runner, name)))


def _ranged(name: str, method: Callable[P, T]) -> Callable[P, T]:
    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            return method(*args, **kwargs)
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    return call
