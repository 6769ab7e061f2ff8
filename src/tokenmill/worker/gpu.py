"""The worker of a GPU: what `build.py` makes for a CPU, from the parts that a GPU needs.

Memory is planned by arithmetic (`config/memory.py`) and then measured: after the weights are in
place, one blank step of the largest size shows what a step takes, and the KV pool gets no more than
what is left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import torch

from tokenmill.checkpoint.checkpoint import Checkpoint
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.memory import GPU_RESERVE_BYTES, format_bytes
from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.errors import ConfigError, MemoryBudgetError
from tokenmill.features.kv_transfer.build import build_kv_transfer
from tokenmill.features.lora.build import OnGpu, build_adapters
from tokenmill.features.spec.build import build_drafter
from tokenmill.layers.gpu import GpuKernels, WeightFormat
from tokenmill.models.base import CausalLM
from tokenmill.models.loader import load_model
from tokenmill.sampling.gpu import GpuSampler
from tokenmill.sampling.logprobs import LogprobsMode
from tokenmill.worker.adapters import RowAdapters
from tokenmill.worker.bind import bind_attention
from tokenmill.worker.graphs.cuda import CudaGraphRecorder, GraphSizes
from tokenmill.worker.graphs.forward import checked
from tokenmill.worker.groups import num_kv_groups
from tokenmill.worker.inputs.device import DeviceInputs
from tokenmill.worker.inputs.multimodal_device import MultiModalDeviceInputs
from tokenmill.worker.inputs.staging import Results, Staging
from tokenmill.worker.kv_groups import kv_cache_config
from tokenmill.worker.limits import RunnerLimits
from tokenmill.worker.model_runner import ModelRunner
from tokenmill.worker.results import finish_later
from tokenmill.worker.row_params import build_row_params
from tokenmill.worker.rows import RowTable
from tokenmill.worker.worker import Worker

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

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
    weight_format = cast(WeightFormat, config.quantization or "plain")
    kernels = GpuKernels(device, exact=config.exact, weight_format=weight_format)
    model = load_model(config.model, checkpoint, on_progress, kernels=kernels)
    adapters = build_adapters(config, model, OnGpu(device, Staging(device).stage_into))
    weights = torch.cuda.memory_allocated(device)
    planned = kv_cache_config(config, model)
    step = _measure_step(config, model, replace(planned, num_blocks=2), device)
    cache = _fit(planned, step + config.ledger.encoder_cache, device)
    runner = make_gpu_runner(config, model, cache, device, adapters)
    _annotate(runner)
    if config.graphs != "off" and _can_be_captured(runner):
        record = CudaGraphRecorder(
            GraphSizes.default(
                config.scheduler.max_num_seqs,
                config.scheduler.max_num_batched_tokens,
                config.scheduler.max_model_len,
            )
        )
        runner.capture(checked(record) if config.graphs == "check" else record)
    runner.warm_up()
    _log_memory(config, cache, weights, step)
    return Worker(runner, cache, build_kv_transfer(config, model, cache, checkpoint))


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
) -> ModelRunner:
    """A runner whose rows are mirrored on `device`, and whose results are finished later."""
    scheduler = config.scheduler
    groups = bind_attention(config, model, cache, device)
    staging, results = Staging(device), Results(device)
    rows = RowTable(
        scheduler.max_num_seqs, scheduler.max_model_len, cache.block_size, num_kv_groups(groups)
    )
    sizes = (scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    inputs = DeviceInputs(rows, *sizes, staging, device)
    if config.encoder is not None:
        inputs = MultiModalDeviceInputs(model, rows, *sizes, staging, device)
    return ModelRunner(
        model,
        groups,
        RunnerLimits(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=scheduler.max_model_len,
            block_size=cache.block_size,
            vocab_size=config.model.vocab_size,
            logits_slab=LOGITS_SLAB,
        ),
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
        drafter=build_drafter(config, _no_draft_model),
        hand_over=finish_later,
    )


def _no_draft_model() -> NoReturn:
    raise AssertionError("models that draft are refused on a GPU (config/draft_model.py)")


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


def _fit(planned: KVCacheConfig, step_bytes: int, device: torch.device) -> KVCacheConfig:
    """The planned pool, or as much of it as the measured memory allows."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    room = free - step_bytes - GPU_RESERVE_BYTES
    num_blocks = min(planned.num_blocks, room // planned.bytes_per_block)
    if num_blocks < 2:
        raise MemoryBudgetError(
            f"The GPU has {format_bytes(free)} free beside the weights; a step takes"
            f" {format_bytes(step_bytes)}, the reserve {format_bytes(GPU_RESERVE_BYTES)}, and the"
            f" KV cache needs at least {format_bytes(2 * planned.bytes_per_block)}. Lower"
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
        cache.num_usable_tokens,
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
