"""Attention layers get their backends and parts of the KV cache, other layers their states."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict

import torch

from tokenmill.attention.backend import AttentionBackend, AttentionSpec, CacheLimits
from tokenmill.attention.selection import select_backend
from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheSpec, StateSpec
from tokenmill.errors import ConfigError
from tokenmill.kernels.state_space import StateCache
from tokenmill.layers.state_space import state_layers
from tokenmill.models.base import CausalLM
from tokenmill.worker.attention_groups import AttentionGroup

logger = logging.getLogger(__name__)


def bind_attention(
    config: EngineConfig,
    model: CausalLM,
    cache: KVCacheConfig,
    device: torch.device | None = None,
) -> list[AttentionGroup]:
    """Give every attention layer its backend and its cache; the groups that share metadata.

    The caches lie on `device`, by default the config's.
    """
    device = device or torch.device(config.device)
    layers = model.attention_layers()
    dtype = getattr(torch, config.cache.dtype)
    kv_dtype = None if config.cache.dtype == config.model.dtype else config.cache.dtype
    groups = []
    slots: dict[tuple[int, int], torch.Tensor] = {}
    for index, kv_group in enumerate(cache.token_groups):
        assert isinstance(kv_group.spec, KVCacheSpec)
        by_spec: defaultdict[AttentionSpec, list[str]] = defaultdict(list)
        for name in kv_group.layer_names:
            spec = layers[name].spec(config.model.dtype, cache.block_size)
            spec = dataclasses.replace(
                spec, kv_dtype=kv_dtype, device=config.device, exact=config.exact
            )
            by_spec[spec].append(name)
        for spec, names in by_spec.items():
            backend, reasons = select_backend(config.attention_backend, spec)
            logger.info("attention backend %s (%s)", backend.name, "; ".join(reasons))
            item_specs = _item_specs(config, backend, spec)
            shape = backend.get_kv_cache_shape(spec, cache.num_blocks)
            for name in names:
                slot = kv_group.spec.bytes_per_token, kv_group.layer_names.index(name)
                if slot not in slots:
                    slots[slot] = _empty_cache(shape, cache.num_blocks, dtype, device)
                impls = [backend.make_impl(each) for each in (spec, *item_specs)]
                layers[name].bind(impls[0], slots[slot].view(shape), *impls[1:])
            builder, *item_builders = (
                backend.make_metadata_builder(each, _limits(config, cache))
                for each in (spec, *item_specs)
            )
            graphs = backend.supports_graphs
            groups.append(
                AttentionGroup(index, tuple(names), builder, graphs, spec.causal, *item_builders)
            )
    return groups + bind_states(model, cache, device)


def _item_specs(
    config: EngineConfig, backend: AttentionBackend, spec: AttentionSpec
) -> list[AttentionSpec]:
    """What tokens of items need beside `spec`, if they see each other in both directions.

    Raises `ConfigError` if the backend has not got it.
    """
    if config.encoder is None or not config.encoder.is_bidirectional:
        return []
    of_items = dataclasses.replace(spec, causal=False)
    reasons = backend.unsupported_reasons(of_items)
    if reasons:
        raise ConfigError(
            f"attention_backend={backend.name!r} cannot serve the images of this model, whose"
            f" tokens see each other in both directions: {'; '.join(reasons)}. Choose another, or"
            f' take no images (limit_mm_per_prompt={{"image": 0}}).'
        )
    return [of_items]


def bind_states(
    model: CausalLM, cache: KVCacheConfig, device: torch.device
) -> list[AttentionGroup]:
    """Give the layers that keep states their blocks; the groups that share metadata."""
    layers = state_layers(model)
    groups = []
    for index, group in enumerate(cache.groups):
        if isinstance(group.spec, StateSpec):
            for name in group.layer_names:
                states = StateCache.empty(cache.num_state_blocks, group.spec, device)
                layers[name].bind(states)
            builder = layers[group.layer_names[0]].metadata_builder(
                cache.block_size, cache.num_state_blocks
            )
            groups.append(AttentionGroup(index, group.layer_names, builder, device.type == "cuda"))
    return groups


def _empty_cache(
    shape: tuple[int, ...], num_blocks: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A cache whose values may be anything, but for zeros in the null block: tiles of a kernel may
    reach into it, though nothing of it counts.

    Not on huge pages: where memory is not in large pieces, the first touch of one stops a step for
    ten milliseconds and more, in every layer.
    """
    cache = torch.empty(shape, dtype=dtype, device=device)
    for dim, size in enumerate(shape[:2]):  # blocks come first, or behind keys and values
        if size == num_blocks:
            cache.select(dim, 0).zero_()
    return cache


def _limits(config: EngineConfig, cache: KVCacheConfig) -> CacheLimits:
    scheduler = config.scheduler
    return CacheLimits(
        num_blocks=cache.num_blocks,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=scheduler.max_model_len,
    )
