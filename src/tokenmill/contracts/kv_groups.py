"""Which layers share a block table, and which share memory."""

from __future__ import annotations

import dataclasses
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


def group_cache(
    config: EngineConfig, specs: Mapping[str, KVCacheSpec], states: Mapping[str, StateSpec]
) -> KVCacheConfig:
    """The pool of a model whose layers keep this, by their names.

    The config counts blocks that hold their tokens in all layers. Where windows let layers share
    memory, a block takes less, and the same memory makes more of them. Where there are only states,
    it counts those.
    """
    state_groups = group_states(states)
    if not specs:
        return KVCacheConfig(1, config.cache.block_size, state_groups, config.cache.num_blocks)
    max_model_len = config.scheduler.max_model_len
    kept = {name: _kept(spec, max_model_len) for name, spec in specs.items()}
    cache = KVCacheConfig(config.cache.num_blocks, config.cache.block_size, group_layers(kept))
    whole_block = cache.block_size * sum(spec.bytes_per_token for spec in kept.values())
    num_blocks = cache.num_blocks * whole_block // cache.bytes_per_block
    return dataclasses.replace(
        cache,
        num_blocks=num_blocks,
        groups=cache.groups + state_groups,
        num_state_blocks=config.ledger.num_state_blocks if states else 0,
    )


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
