"""From a loaded model that pools to the worker that runs it."""

from __future__ import annotations

import torch

from tokenmill.config.engine_config import EngineConfig
from tokenmill.features.lora.build import build_adapters
from tokenmill.layers.kernels import LayerKernels, uses_native_kernels
from tokenmill.models.base import CausalLM
from tokenmill.worker.bind import bind_attention
from tokenmill.worker.graphs.cpu import record
from tokenmill.worker.graphs.forward import checked
from tokenmill.worker.limits import RunnerLimits
from tokenmill.worker.pooling.pooler import Pooler
from tokenmill.worker.pooling.runner import EncoderRunner, PoolingRunner
from tokenmill.worker.ranks import ONE_RANK, OneRank
from tokenmill.worker.worker import Worker


def build_pooling_worker(
    config: EngineConfig, model: CausalLM, kernels: LayerKernels, ranks: OneRank = ONE_RANK
) -> Worker:
    """A worker on the CPU, for the model or a rank's part of it. Decoders are recorded as they are
    for sampling; encoders run directly.

    Raises `ConfigError` as `select_backend` does.
    """
    pooling, scheduler = config.model.pooling, config.scheduler
    assert pooling is not None
    cache = ranks.kv_cache(config, model, kernels)
    limits = RunnerLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=scheduler.max_model_len,
        block_size=config.cache.block_size,
        vocab_size=config.model.vocab_size,
    )
    own_part = ranks.own_part(cache, model)
    runner = ranks.make_runner(
        PoolingRunner if pooling.is_causal else EncoderRunner,
        ranks.wrapped(config, model, kernels),
        bind_attention(config, model, own_part, torch.device(config.device)),
        limits,
        pooler=Pooler(pooling, model),
        inputs=ranks.inputs(config, model, cache, limits),
        adapters=build_adapters(config, model),
    )
    if pooling.is_causal and config.graphs != "off" and uses_native_kernels(config.model.dtype):
        runner.capture(checked(record) if config.graphs == "check" else record)
    return ranks.make_worker(config, runner, cache)
