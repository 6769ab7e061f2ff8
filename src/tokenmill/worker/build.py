"""From settings and a checkpoint to a worker. Features are wired here, one line each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import torch

from tokenmill.checkpoint.checkpoint import Checkpoint
from tokenmill.config.engine_config import EngineConfig
from tokenmill.features.kv_transfer.build import build_kv_transfer
from tokenmill.kernels import native
from tokenmill.layers.kernels import layer_kernels, uses_native_kernels
from tokenmill.models.loader import load_model
from tokenmill.quantization.packed_blocks import Quantization
from tokenmill.sampling.logprobs import LogprobsMode
from tokenmill.sampling.sampler import Sampler
from tokenmill.worker.bind import bind_attention
from tokenmill.worker.draft_head import make_drafter, runner_kind
from tokenmill.worker.graphs.build import record_steps
from tokenmill.worker.limits import RunnerLimits
from tokenmill.worker.pooling.build import build_pooling_worker
from tokenmill.worker.ranks import ONE_RANK, OneRank
from tokenmill.worker.row_params import build_row_params
from tokenmill.worker.worker import Worker

logger = logging.getLogger(__name__)


def build_worker(
    config: EngineConfig,
    checkpoint: Checkpoint,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    ranks: OneRank = ONE_RANK,
) -> Worker:
    """Load the model, allocate its KV cache, and make the worker that runs it; of several ranks,
    that of one.

    `on_progress` is called with the bytes of the checkpoint loaded so far, and in total. Raises
    `CheckpointError` and `ConfigError` as `load_model` and `select_backend` do.
    """
    if config.device == "cuda":
        from tokenmill.worker.gpu import build_gpu_worker  # needs triton

        return build_gpu_worker(config, checkpoint, on_progress)
    _set_num_threads(config)
    quantization = cast(Quantization | None, config.quantization)
    kernels = layer_kernels(getattr(torch, config.model.dtype), quantization, ranks.group)
    layers = ranks.layers(config)
    model = load_model(config.model, checkpoint, on_progress, kernels=kernels, layers=layers)
    if config.model.pooling is not None:
        return build_pooling_worker(config, model, kernels, ranks)
    cache = ranks.kv_cache(config, model, kernels)
    limits = RunnerLimits.of(config)
    own_part = ranks.own_part(cache, model)
    groups = bind_attention(config, model, own_part)
    runner = ranks.make_runner(
        runner_kind(config),
        ranks.wrapped(config, model, kernels),
        groups,
        limits,
        inputs=ranks.inputs(config, model, cache, limits),
        sampler=Sampler(mode=LogprobsMode.named(config.sampling.logprobs_mode)),
        row_params=build_row_params(config),
        adapters=ranks.adapters(config, model, kernels),
        drafter=make_drafter(config, model, cache, ranks.group),
    )
    record_steps(config, runner, with_decode_steps=ranks.records_decode_steps)
    kv_transfer = build_kv_transfer(config, model, cache, checkpoint)
    return ranks.make_worker(config, runner, cache, kv_transfer)


def _set_num_threads(config: EngineConfig) -> None:
    """Give the threads to the kernels that do the work.

    Two pools would take the processors from each other, so torch keeps one thread where it has only
    small things left to do.
    """
    native.set_num_threads(config.num_threads)
    torch.set_num_threads(1 if uses_native_kernels(config.model.dtype) else config.num_threads)
