"""From a loaded model that pools to the worker that runs it."""

from __future__ import annotations

from tokenmill.config.engine_config import EngineConfig
from tokenmill.layers.kernels import LayerKernels
from tokenmill.models.base import CausalLM
from tokenmill.worker.bind import bind_attention
from tokenmill.worker.graphs.build import record_steps
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
    pooling = config.model.pooling
    assert pooling is not None
    cache = ranks.kv_cache(config, model, kernels)
    limits = RunnerLimits.of(config)
    own_part = ranks.own_part(cache, model)
    runner = ranks.make_runner(
        PoolingRunner if pooling.is_causal else EncoderRunner,
        ranks.wrapped(config, model, kernels),
        bind_attention(config, model, own_part),
        limits,
        pooler=Pooler(pooling, model),
        inputs=ranks.inputs(config, model, cache, limits),
        adapters=ranks.adapters(config, model, kernels),
    )
    if pooling.is_causal:
        record_steps(config, runner, with_decode_steps=False)
    return ranks.make_worker(config, runner, cache)
