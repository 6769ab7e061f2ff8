"""How a step's forward pass is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmill.attention.backend import AttentionMetadata
from tokenmill.attention.forward_context import set_forward_context
from tokenmill.models.base import CausalLM
from tokenmill.worker.batch import BatchShape, BatchTensors


@dataclass(slots=True)
class GraphStats:
    """How often a recording served."""

    num_replayed: int = 0
    num_direct: int = 0
    num_padded_tokens: int = 0
    """Tokens computed for nothing, so that a step fits a recording."""


class ForwardPass(Protocol):
    """Runs the model on one flat batch."""

    @property
    def stats(self) -> GraphStats: ...

    def padded(self, shape: BatchShape) -> BatchShape:
        """The shape that a step of `shape` must be prepared in."""
        ...

    def run(
        self, tensors: BatchTensors, attn_metadata: Mapping[str, AttentionMetadata]
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size]; valid until the next call."""
        ...


BlankStep = Callable[[BatchShape], tuple[BatchTensors, Mapping[str, AttentionMetadata]]]
"""Prepares a step of some shape that touches no request."""

Recorder = Callable[[CausalLM, BatchShape, BlankStep], ForwardPass]
"""Records a model's forward pass, given the largest step, on the buffers of blank steps."""


class DirectForward:
    """The model's own forward, kernel by kernel."""

    def __init__(self, model: CausalLM, stats: GraphStats | None = None) -> None:
        """`stats` are counted on, where they are also those of another pass."""
        self._model = model
        self.stats = stats or GraphStats()

    def padded(self, shape: BatchShape) -> BatchShape:
        """As it is."""
        return shape

    def run(
        self, tensors: BatchTensors, attn_metadata: Mapping[str, AttentionMetadata]
    ) -> torch.Tensor:
        self.stats.num_direct += 1
        with set_forward_context(attn_metadata):
            hidden_states = self._model.forward(
                tensors.input_ids, tensors.positions, inputs_embeds=tensors.inputs_embeds
            )
        assert isinstance(hidden_states, torch.Tensor), "the last rank ends in hidden states"
        return hidden_states


class CheckedForward:
    """Runs every step both ways and compares the bits: a check for whoever changes a kernel."""

    def __init__(self, recorded: ForwardPass, direct: ForwardPass) -> None:
        self.recorded = recorded
        self._direct = direct

    @property
    def stats(self) -> GraphStats:
        return self.recorded.stats

    def padded(self, shape: BatchShape) -> BatchShape:
        """As the recording wants it."""
        return self.recorded.padded(shape)

    def run(
        self, tensors: BatchTensors, attn_metadata: Mapping[str, AttentionMetadata]
    ) -> torch.Tensor:
        expected = self._direct.run(tensors, attn_metadata).clone()
        found = self.recorded.run(tensors, attn_metadata)
        num_tokens = int(tensors.query_start_loc[-1])  # behind them lies padding
        if not torch.equal(expected[:num_tokens], found[:num_tokens]):
            differs = expected[:num_tokens] != found[:num_tokens]
            rows = differs.any(-1).nonzero().flatten().tolist()
            raise AssertionError(f"the recorded step differs from the direct one in rows {rows}")
        return found


def checked(record: Recorder) -> Recorder:
    """The same recording, with every step compared with the direct pass."""

    def record_checked(model: CausalLM, largest: BatchShape, blank_step: BlankStep) -> ForwardPass:
        return CheckedForward(record(model, largest, blank_step), DirectForward(model))

    return record_checked
