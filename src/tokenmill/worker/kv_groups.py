"""Which layers share a block table, and which share memory."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.kv_layout import group_size
from tokenmill.contracts.kv_cache import (
    KVCacheConfig,
    KVCacheGroup,
    KVCacheKind,
    KVCacheSpec,
    StateSpec,
)
from tokenmill.layers.state_space import state_layers
from tokenmill.models.base import CausalLM

logger = logging.getLogger(__name__)


def kv_cache_config(config: EngineConfig, model: CausalLM) -> KVCacheConfig:
    """The pool of a model.

    The config counts blocks that hold their tokens in all layers. Where windows let layers share
    memory, a block takes less, and the same memory makes more of them. Where there are only states,
    it counts those.
    """
    states = group_states({name: each.state_spec for name, each in state_layers(model).items()})
    if not model.attention_layers():
        return KVCacheConfig(1, config.cache.block_size, states, config.cache.num_blocks)
    max_model_len = config.scheduler.max_model_len
    specs = {
        name: _kept(layer.kv_cache_spec(config.cache.dtype), max_model_len)
        for name, layer in model.attention_layers().items()
    }
    cache = KVCacheConfig(config.cache.num_blocks, config.cache.block_size, group_layers(specs))
    whole_block = cache.block_size * sum(spec.bytes_per_token for spec in specs.values())
    num_blocks = cache.num_blocks * whole_block // cache.bytes_per_block
    cache = dataclasses.replace(cache, num_blocks=num_blocks)
    if len(cache.groups) > 1:
        _log_groups(cache, max_model_len, config.scheduler.max_num_batched_tokens)
    if not states:
        return cache
    num_states = config.ledger.num_state_blocks
    num_layers = sum(len(group.layer_names) for group in states)
    logger.info(
        "KV cache: %d layers keep states, in %d blocks of their own", num_layers, num_states
    )
    return dataclasses.replace(cache, groups=cache.groups + states, num_state_blocks=num_states)


def group_states(specs: Mapping[str, StateSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers that keep states of one form are one group: all have them behind the same tokens."""
    by_spec: defaultdict[StateSpec, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        by_spec[spec].append(name)
    return tuple(KVCacheGroup(tuple(names), spec) for spec, names in by_spec.items())


def group_layers(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers of one kind form groups, of the same size for all kinds that can share memory.

    Slots that a smaller group leaves empty are lost, so groups are as small as the rarest kind, but
    larger where there would be too many.
    """
    by_size: defaultdict[int, defaultdict[KVCacheSpec, list[str]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for name, spec in specs.items():
        by_size[spec.bytes_per_token][spec].append(name)
    return tuple(
        KVCacheGroup(names, spec)
        for kinds in by_size.values()
        for spec, layers in kinds.items()
        for names in _cut(layers, group_size([len(layers) for layers in kinds.values()]))
    )


def _cut(layers: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(layers[start : start + size]) for start in range(0, len(layers), size)]


def _kept(spec: KVCacheSpec, max_model_len: int) -> KVCacheSpec:
    """What a layer really keeps: a window as long as the context keeps everything."""
    window = spec.sliding_window
    if spec.kind is KVCacheKind.SLIDING_WINDOW and window is not None and window < max_model_len:
        return spec
    return dataclasses.replace(spec, kind=KVCacheKind.FULL, sliding_window=None)


def _log_groups(cache: KVCacheConfig, max_model_len: int, max_step_tokens: int) -> None:
    windows = (group.spec.sliding_window for group in cache.groups)
    groups = ", ".join(
        f"{len(group.layer_names)} layers that keep {window or 'all'} tokens"
        for group, window in zip(cache.groups, windows, strict=True)
    )
    logger.info(
        "KV cache groups: %s; %d blocks in all, of which a sequence of %d tokens holds at most %d",
        groups,
        cache.num_blocks,
        max_model_len,
        cache.blocks_needed(max_model_len, max_step_tokens),
    )
