"""From a loaded model that pools to the worker that runs it."""

from __future__ import annotations

import torch

from tokenmill.config.engine_config import EngineConfig
from tokenmill.features.lora.build import build_adapters
from tokenmill.layers.kernels import uses_native_kernels
from tokenmill.models.base import CausalLM
from tokenmill.worker.bind import bind_attention
from tokenmill.worker.graphs.cpu import record
from tokenmill.worker.graphs.forward import checked
from tokenmill.worker.kv_groups import kv_cache_config
from tokenmill.worker.limits import RunnerLimits
from tokenmill.worker.pooling.pooler import Pooler
from tokenmill.worker.pooling.runner import EncoderRunner, PoolingRunner
from tokenmill.worker.worker import Worker


def build_pooling_worker(config: EngineConfig, model: CausalLM) -> Worker:
    """A worker on the CPU. Decoders are recorded as they are for sampling; encoders run directly.

    Raises `ConfigError` as `select_backend` does.
    """
    pooling, scheduler = config.model.pooling, config.scheduler
    assert pooling is not None
    cache = kv_cache_config(config, model)
    kind = PoolingRunner if pooling.is_causal else EncoderRunner
    runner = kind(
        model,
        bind_attention(config, model, cache, torch.device(config.device)),
        RunnerLimits(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=scheduler.max_model_len,
            block_size=config.cache.block_size,
            vocab_size=config.model.vocab_size,
        ),
        Pooler(pooling, model),
        build_adapters(config, model),
    )
    if pooling.is_causal and config.graphs != "off" and uses_native_kernels(config.model.dtype):
        runner.capture(checked(record) if config.graphs == "check" else record)
    return Worker(runner, cache)
