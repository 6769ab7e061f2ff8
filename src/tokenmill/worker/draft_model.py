"""The model that drafts: a runner of its own, on the blocks of the model that it drafts for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

import torch

from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config.engine_config import EngineConfig, ModelConfig, SamplingConfig
from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheKind, KVCacheSpec
from tokenmill.contracts.kv_groups import group_layers
from tokenmill.errors import ConfigError
from tokenmill.features.spec.depths import Agree, alone
from tokenmill.features.spec.draft_model import DraftLimits
from tokenmill.layers.kernels import layer_kernels
from tokenmill.models.base import CausalLM
from tokenmill.models.loader import load_model
from tokenmill.parallel.group import SOLO, TensorGroup
from tokenmill.quantization.packed_blocks import Quantization
from tokenmill.worker.bind import bind_attention
from tokenmill.worker.graphs.build import record_steps
from tokenmill.worker.limits import RunnerLimits
from tokenmill.worker.model_runner import ModelRunner


def make_draft_runner(
    config: EngineConfig, target_cache: KVCacheConfig, group: TensorGroup = SOLO
) -> tuple[ModelRunner, DraftLimits]:
    """Load the model that drafts, of several ranks a part of each layer, and give it K and V for
    each block of the other's pool.

    Raises `ConfigError` if no layer of the other model keeps all of a sequence, and what
    `load_model` raises.
    """
    config = config_of_draft(config)
    model = _load(config, group)
    cache = cache_of_draft(config, model, target_cache)
    limits = limits_of_drafts(config, cache, target_cache)
    runner = ModelRunner(
        model,
        bind_attention(config, model, cache),
        RunnerLimits.of(config),
    )
    record_steps(config, runner)
    return runner, limits


def limits_of_drafts(
    config: EngineConfig, cache: KVCacheConfig, target_cache: KVCacheConfig
) -> DraftLimits:
    """Of the model that drafts, with its settings and its cache; raises as `make_draft_runner`."""
    return DraftLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=config.model.max_model_len,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        kv_group=_group_that_keeps_all(target_cache),
        num_groups=len(cache.groups),
    )


def _group_that_keeps_all(cache: KVCacheConfig) -> int:
    for index, group in enumerate(cache.groups):
        if isinstance(group.spec, KVCacheSpec) and group.spec.kind is KVCacheKind.FULL:
            return index
    raise ConfigError(
        "speculative_config.model drafts for models with layers that keep all of a sequence, but"
        " every layer of this one has a sliding window: take method='ngram'."
    )


def config_of_draft(config: EngineConfig) -> EngineConfig:
    """The engine's settings with the model that drafts, which there must be, in place of the other
    one.
    """
    assert config.speculation is not None
    draft = config.speculation.draft
    assert draft is not None
    return dataclasses.replace(
        config,
        model=ModelConfig(
            name=draft.path,
            path=draft.path,
            architecture=draft.architecture,
            hf_config=draft.hf_config,
            dtype=draft.dtype,
            max_model_len=draft.max_model_len,
            vocab_size=draft.vocab_size,
            takes_images=False,
        ),
        cache=dataclasses.replace(config.cache, dtype=draft.dtype),
        quantization=draft.quantization,
        sampling=SamplingConfig(),
        speculation=None,
        lora=None,
        encoder=None,
    )


def first_rank_decides(group: TensorGroup) -> Agree:
    """What the first rank of a group has chosen; to be asked by all of them alike."""
    if group.size == 1:
        return alone

    def agree(numbers: list[int]) -> list[int]:
        if not numbers:
            return numbers
        own = numbers if group.rank == 0 else [0] * len(numbers)
        column = torch.tensor(own, dtype=torch.float32)[:, None]
        found: list[int] = group.all_reduce(column)[:, 0].int().tolist()
        return found

    return agree


def _load(config: EngineConfig, group: TensorGroup) -> CausalLM:
    quantization = cast(Quantization | None, config.quantization)
    kernels = layer_kernels(getattr(torch, config.model.dtype), quantization, group)
    return load_model(config.model, open_checkpoint(Path(config.model.path)), kernels=kernels)


def cache_of_draft(
    config: EngineConfig, model: CausalLM, target_cache: KVCacheConfig
) -> KVCacheConfig:
    """As many blocks as the other model has; windows release nothing here."""
    specs = {
        name: dataclasses.replace(
            layer.kv_cache_spec(config.cache.dtype), kind=KVCacheKind.FULL, sliding_window=None
        )
        for name, layer in model.attention_layers().items()
    }
    return KVCacheConfig(target_cache.num_blocks, target_cache.block_size, group_layers(specs))
