"""The KV cache of a model that is built: what its layers keep, in groups."""

from __future__ import annotations

import logging

from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.contracts.kv_groups import group_cache
from tokenmill.layers.state_space import state_layers
from tokenmill.models.base import CausalLM

logger = logging.getLogger(__name__)


def kv_cache_config(config: EngineConfig, model: CausalLM) -> KVCacheConfig:
    """The pool of a model; `group_cache` says how it lies."""
    dtype = config.cache.dtype
    layers = model.attention_layers()
    cache = group_cache(
        config,
        {name: layer.kv_cache_spec(dtype) for name, layer in layers.items()},
        {name: each.state_spec for name, each in state_layers(model).items()},
    )
    if len(cache.token_groups) > 1:
        _log_groups(cache, config.scheduler.max_model_len, config.scheduler.max_num_batched_tokens)
    if layers and cache.num_state_blocks:
        num_layers = sum(len(group.layer_names) for group in cache.groups if group.keeps_states)
        logger.info(
            "KV cache: %d layers keep states, in %d blocks of their own",
            num_layers,
            cache.num_state_blocks,
        )
    return cache


def _log_groups(cache: KVCacheConfig, max_model_len: int, max_step_tokens: int) -> None:
    windows = (group.spec.sliding_window for group in cache.token_groups)
    groups = ", ".join(
        f"{len(group.layer_names)} layers that keep {window or 'all'} tokens"
        for group, window in zip(cache.token_groups, windows, strict=True)
    )
    logger.info(
        "KV cache groups: %s; %d blocks in all, of which a sequence of %d tokens holds at most %d",
        groups,
        cache.num_blocks,
        max_model_len,
        cache.blocks_needed(max_model_len, max_step_tokens),
    )
