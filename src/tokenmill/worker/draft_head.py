"""The head that drafts: a runner of its own, fed with hidden states of the model beside it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.features.spec.build import Drafters, build_drafter
from tokenmill.features.spec.draft_head import HeadDrafter
from tokenmill.layers.kernels import layer_kernels
from tokenmill.models.base import CausalLM
from tokenmill.models.decoder import Decoder
from tokenmill.models.draft_head import DraftHead
from tokenmill.models.draft_head_loader import load_draft_head
from tokenmill.models.hidden_states import HiddenStates
from tokenmill.parallel.group import SOLO, TensorGroup
from tokenmill.quantization.packed_blocks import Quantization
from tokenmill.sampling.grammar_mask import GrammarMask
from tokenmill.sampling.metadata import SamplingMetadata
from tokenmill.sampling.row_params import RowSamplingParams
from tokenmill.worker.batch import IntArray
from tokenmill.worker.bind import bind_attention
from tokenmill.worker.draft_model import (
    cache_of_draft,
    config_of_draft,
    first_rank_decides,
    limits_of_drafts,
    make_draft_runner,
)
from tokenmill.worker.graphs.build import record_steps
from tokenmill.worker.limits import RunnerLimits
from tokenmill.worker.model_runner import BoolArray, ModelRunner


def runner_kind(config: EngineConfig) -> type[ModelRunner]:
    """Of runner that the drafter of these settings needs beside it."""
    speculation = config.speculation
    reads = speculation is not None and speculation.reads_hidden_states
    return HeadedRunner if reads else ModelRunner


def make_drafter(
    config: EngineConfig, model: CausalLM, cache: KVCacheConfig, group: TensorGroup = SOLO
) -> Drafters | None:
    """What drafts for a model on a CPU, of a group of ranks for this one's part, and for the blocks
    of its pool; None if nothing does.

    Raises as `make_draft_runner` and `make_head_drafter` do.
    """
    return build_drafter(
        config,
        partial(make_draft_runner, config, cache, group),
        partial(make_head_drafter, config, model, cache),
        first_rank_decides(group),
    )


def make_head_drafter(
    config: EngineConfig, target: CausalLM, target_cache: KVCacheConfig
) -> HeadDrafter:
    """Load the head, have the model keep what it reads, and give it K and V for each block of the
    model's pool.

    Raises `ConfigError` if no layer of the model keeps all of a sequence, and what
    `load_draft_head` raises.
    """
    speculation = config.speculation
    assert speculation is not None
    assert speculation.draft is not None
    assert isinstance(target, Decoder), "other models are refused (config/draft_head.py)"
    own = config_of_draft(config)
    dtype, scheduler = getattr(torch, own.model.dtype), own.scheduler
    head = load_draft_head(
        speculation.method,
        own.model.path,
        own.model.hf_config,
        target,
        dtype=dtype,
        kernels=layer_kernels(dtype, cast(Quantization | None, own.quantization)),
        max_model_len=own.model.max_model_len,
        max_num_tokens=scheduler.max_num_batched_tokens,
    )
    states = HiddenStates(
        target,
        speculation.draft.aux_layers,
        max_num_tokens=scheduler.max_num_batched_tokens,
        dtype=dtype,
    )
    cache = cache_of_draft(own, head, target_cache)
    return HeadDrafter(
        _make_runner(own, head, cache),
        FedHead(head, states),
        limits_of_drafts(own, cache, target_cache),
        speculation.num_speculative_tokens,
        adaptive=speculation.adaptive,
    )


def _make_runner(config: EngineConfig, head: DraftHead, cache: KVCacheConfig) -> ModelRunner:
    limits = RunnerLimits.of(config)
    runner = ModelRunner(
        head,
        bind_attention(config, head, cache),
        limits,
        row_params=EntryParams(limits.max_num_seqs, limits.vocab_size),
    )
    record_steps(config, runner, with_decode_steps=False)
    return runner


class EntryParams(RowSamplingParams):
    """Of a head, whose entry i has token i + 1: noise is that of the tokens' own places."""

    def gather(
        self,
        rows: IntArray,
        positions: IntArray,
        num_prompt_tokens: IntArray,
        token_ids: torch.Tensor,
        grammar: GrammarMask,
    ) -> SamplingMetadata:
        metadata = super().gather(rows, positions, num_prompt_tokens, token_ids, grammar)
        return replace(metadata, random=replace(metadata.random, position=positions + 1))


class FedHead:
    """Brings hidden states to the head's next pass."""

    def __init__(self, head: DraftHead, states: HiddenStates) -> None:
        self._head = head
        self._states = states

    @torch.inference_mode()
    def feed_from_model(self, places: npt.NDArray[np.int64]) -> None:
        """Those of the tokens at `places` of the model's last step."""
        self._head.take(self._head.fuse(self._states.take(places)))

    @torch.inference_mode()
    def feed_back(self, places: npt.NDArray[np.int64]) -> None:
        """Those that the entries at `places` of the head's last pass have left."""
        self._head.take(self._head.left(torch.from_numpy(places)))


class HeadedRunner(ModelRunner):
    """Runs the model that a head drafts for, and tells the drafter what each step computes."""

    @property
    def _head(self) -> HeadDrafter:
        assert isinstance(self._drafter, HeadDrafter)
        return self._drafter

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._head.begin(plan, self._rows.num_computed_tokens[plan.rows])
        super().execute_model(plan)

    def _propose(
        self, req_ids: list[str], rows: IntArray, num_tokens: IntArray, gained: BoolArray
    ) -> dict[str, list[int]]:
        self._head.settle(num_tokens - 1)
        return super()._propose(req_ids, rows, num_tokens, gained)
