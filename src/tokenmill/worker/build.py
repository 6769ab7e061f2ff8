"""From settings and a checkpoint to a worker. Features are wired here, one line each."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable

import torch

from tokenmill.attention.backend import AttentionSpec
from tokenmill.attention.selection import select_backend
from tokenmill.checkpoint.checkpoint import Checkpoint
from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheKind, KVCacheSpec
from tokenmill.kernels import native
from tokenmill.layers.kernels import uses_native_kernels
from tokenmill.models.base import CausalLM
from tokenmill.models.loader import load_model
from tokenmill.worker.graphs.cpu import record
from tokenmill.worker.graphs.forward import checked
from tokenmill.worker.model_runner import AttentionGroup, ModelRunner, RunnerLimits
from tokenmill.worker.worker import Worker

logger = logging.getLogger(__name__)


def build_worker(
    config: EngineConfig,
    checkpoint: Checkpoint,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Worker:
    """Load the model, allocate its KV cache, and make the worker that runs it.

    `on_progress` is called with the bytes of the checkpoint loaded so far, and in total. Raises
    `CheckpointError` and `ConfigError` as `load_model` and `select_backend` do.
    """
    _set_num_threads(config)
    model = load_model(config.model, checkpoint, on_progress)
    cache = kv_cache_config(config, model)
    runner = ModelRunner(
        model,
        bind_attention(config, model, cache),
        RunnerLimits(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=config.scheduler.max_model_len,
            block_size=config.cache.block_size,
            vocab_size=config.model.vocab_size,
        ),
    )
    if config.graphs != "off" and uses_native_kernels(config.model.dtype):
        runner.capture(checked(record) if config.graphs == "check" else record)
    return Worker(runner, cache)


def _set_num_threads(config: EngineConfig) -> None:
    """Give the threads to the kernels that do the work.

    Two pools would take the processors from each other, so torch keeps one thread where it has only
    small things left to do.
    """
    native.set_num_threads(config.num_threads)
    torch.set_num_threads(1 if uses_native_kernels(config.model.dtype) else config.num_threads)


def kv_cache_config(config: EngineConfig, model: CausalLM) -> KVCacheConfig:
    """The pool of a model: layers that keep the same of each sequence form a group."""
    by_spec: defaultdict[KVCacheSpec, list[str]] = defaultdict(list)
    for name, layer in model.attention_layers().items():
        by_spec[_kept(layer.kv_cache_spec(config.model.dtype))].append(name)
    return KVCacheConfig(
        num_blocks=config.cache.num_blocks,
        block_size=config.cache.block_size,
        groups=tuple(KVCacheGroup(tuple(names), spec) for spec, names in by_spec.items()),
    )


def bind_attention(
    config: EngineConfig, model: CausalLM, cache: KVCacheConfig
) -> list[AttentionGroup]:
    """Give every attention layer its backend and its cache; the groups that share metadata."""
    layers = model.attention_layers()
    dtype = getattr(torch, config.model.dtype)
    groups = []
    for index, kv_group in enumerate(cache.groups):
        by_spec: defaultdict[AttentionSpec, list[str]] = defaultdict(list)
        for name in kv_group.layer_names:
            by_spec[layers[name].spec(config.model.dtype, cache.block_size)].append(name)
        for spec, names in by_spec.items():
            backend, reasons = select_backend(config.attention_backend, spec)
            logger.info("attention backend %s (%s)", backend.name, "; ".join(reasons))
            shape = backend.get_kv_cache_shape(
                cache.num_blocks, cache.block_size, spec.num_kv_heads, spec.head_size
            )
            for name in names:
                # Not zeroed: pages cost memory only when they are first written, and attention
                # reads no slot that was not.
                layers[name].bind(backend.make_impl(spec), torch.empty(shape, dtype=dtype))
            builder = backend.make_metadata_builder(spec, cache.num_blocks)
            groups.append(AttentionGroup(index, tuple(names), builder))
    return groups


def _kept(spec: KVCacheSpec) -> KVCacheSpec:
    """A layer that keeps every token keeps the same with or without a window."""
    if spec.kind is KVCacheKind.FULL:
        return dataclasses.replace(spec, sliding_window=None)
    return spec
