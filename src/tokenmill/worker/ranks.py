"""What a worker is told of the other ranks of its model, and what becomes of its parts then."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.parallel import RankPlace
from tokenmill.config.parameters import read_parameters
from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec, StateSpec
from tokenmill.contracts.seams import KVTransfer
from tokenmill.features.lora.adapters import Adapters
from tokenmill.features.lora.build import build_adapters
from tokenmill.layers.kernels import LayerKernels
from tokenmill.models.base import CausalLM
from tokenmill.models.loader import outline
from tokenmill.parallel.group import SOLO, SharedMemoryGroup, TensorGroup
from tokenmill.parallel.links import StageLinks
from tokenmill.worker.attention_groups import AttentionGroup
from tokenmill.worker.group_worker import GroupWorker
from tokenmill.worker.inputs.host import HostInputs
from tokenmill.worker.inputs.multimodal import multimodal_inputs
from tokenmill.worker.inputs.protocol import StepInputs
from tokenmill.worker.kv_cache import kv_cache_config
from tokenmill.worker.limits import RunnerLimits
from tokenmill.worker.model_runner import ModelRunner
from tokenmill.worker.stage import PassingRunner, ReceivingForward, StageModel, StageWorker
from tokenmill.worker.worker import Worker


class OneRank:
    """There are no others."""

    group: TensorGroup = SOLO

    def layers(self, config: EngineConfig) -> range | None:
        """Layers that are loaded here; None is all of them."""
        return None

    def kv_cache(
        self, config: EngineConfig, model: CausalLM, kernels: LayerKernels
    ) -> KVCacheConfig:
        """The pool, with the layers of all ranks."""
        return kv_cache_config(config, model)

    def own_part(self, cache: KVCacheConfig, model: CausalLM) -> KVCacheConfig:
        """The pool, with the layers that are here."""
        return cache

    def inputs(
        self, config: EngineConfig, model: CausalLM, cache: KVCacheConfig, limits: RunnerLimits
    ) -> StepInputs | None:
        """What prepares steps, where that is not the runner's choice."""
        return multimodal_inputs(config, model, limits, len(cache.groups))

    def wrapped(self, config: EngineConfig, model: CausalLM, kernels: LayerKernels) -> CausalLM:
        """What the runner runs."""
        return model

    def adapters(
        self, config: EngineConfig, model: CausalLM, kernels: LayerKernels
    ) -> Adapters | None:
        """What changes the layers that are here; None without `enable_lora`."""
        return build_adapters(config, model)

    records_decode_steps = True
    """Whether a step can be one native call, from tokens to tokens."""

    def make_runner(
        self,
        kind: Callable[..., ModelRunner],
        model: CausalLM,
        attention_groups: Sequence[AttentionGroup],
        limits: RunnerLimits,
        **parts: Any,
    ) -> ModelRunner:
        """A runner of this kind with these parts, or what stands for it here."""
        return kind(model, attention_groups, limits, **parts)

    def make_worker(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        cache: KVCacheConfig,
        kv_transfer: KVTransfer | None = None,
    ) -> Worker:
        """The worker around a runner that has recorded what it records."""
        return Worker(runner, cache, kv_transfer)


ONE_RANK = OneRank()


@dataclass(frozen=True, slots=True)
class GroupRanks(OneRank):
    """A rank beside others that have parts of the same layers."""

    place: RankPlace
    group: TensorGroup = field()  # without one rank's default

    def make_worker(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        cache: KVCacheConfig,
        kv_transfer: KVTransfer | None = None,
    ) -> Worker:
        return GroupWorker(runner, cache, kv_transfer, self.group)

    def break_up(self) -> None:
        """Have the others fail that wait for this rank, which has failed."""
        if isinstance(self.group, SharedMemoryGroup):
            self.group.break_up()


@dataclass(frozen=True, slots=True)
class StageRanks(GroupRanks):
    """A rank of one stage of several, perhaps beside others of the same stage."""

    links: StageLinks
    records_decode_steps = False

    def layers(self, config: EngineConfig) -> range:
        return self.place.layers(read_parameters(config.model.hf_config).num_layers)

    def kv_cache(
        self, config: EngineConfig, model: CausalLM, kernels: LayerKernels
    ) -> KVCacheConfig:
        """All stages have the same block tables, so groups are made of the layers of all."""
        return spread_over_stages(kv_cache_config(config, outline(config.model, kernels)))

    def own_part(self, cache: KVCacheConfig, model: CausalLM) -> KVCacheConfig:
        own = model.attention_layers()
        groups = tuple(
            KVCacheGroup(tuple(name for name in group.layer_names if name in own), group.spec)
            for group in cache.groups
        )
        return dataclasses.replace(cache, groups=groups)

    def inputs(
        self, config: EngineConfig, model: CausalLM, cache: KVCacheConfig, limits: RunnerLimits
    ) -> StepInputs:
        """With block tables for groups of which no layer is here, too: plans have them."""
        with_items = multimodal_inputs(config, model, limits, len(cache.groups))
        if with_items is not None:
            with_items.items.are_embedded = self.place.is_first_stage
            return with_items
        return HostInputs(limits.make_rows(len(cache.groups)), limits.max_num_batched_tokens)

    def wrapped(self, config: EngineConfig, model: CausalLM, kernels: LayerKernels) -> StageModel:
        hidden_size = read_parameters(config.model.hf_config).hidden_size
        return StageModel(model, kernels, hidden_size, is_first=self.place.is_first_stage)

    def adapters(
        self, config: EngineConfig, model: CausalLM, kernels: LayerKernels
    ) -> Adapters | None:
        """Those of the layers that are here, of files for all layers."""
        if config.lora is None:
            return None
        return build_adapters(config, model, whole=outline(config.model, kernels))

    def make_runner(
        self,
        kind: Callable[..., ModelRunner],
        model: CausalLM,
        attention_groups: Sequence[AttentionGroup],
        limits: RunnerLimits,
        **parts: Any,
    ) -> ModelRunner:
        if self.place.is_last_stage:
            return kind(model, attention_groups, limits, **parts)
        shared = {name: parts[name] for name in ("inputs", "adapters")}
        return PassingRunner(model, attention_groups, limits, links=self.links, **shared)

    def make_worker(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        cache: KVCacheConfig,
        kv_transfer: KVTransfer | None = None,
    ) -> Worker:
        if not self.place.is_first_stage:
            hidden_size = read_parameters(config.model.hf_config).hidden_size
            runner.wrap_forward(
                partial(ReceivingForward, links=self.links, hidden_size=hidden_size)
            )
        return StageWorker(runner, cache, kv_transfer, self.group)


def spread_over_stages(cache: KVCacheConfig) -> KVCacheConfig:
    """Groups that keep the same, with their layers dealt out in turn: so each stage has about as
    many of each group, and the memory of a block is divided among the stages.
    """
    by_spec: defaultdict[KVCacheSpec | StateSpec, list[int]] = defaultdict(list)
    for index, group in enumerate(cache.groups):
        by_spec[group.spec].append(index)
    groups = list(cache.groups)
    for spec, indices in by_spec.items():
        names = [name for index in indices for name in cache.groups[index].layer_names]
        for turn, index in enumerate(indices):
            groups[index] = KVCacheGroup(tuple(names[turn :: len(indices)]), spec)
    return dataclasses.replace(cache, groups=tuple(groups))
