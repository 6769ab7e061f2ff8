"""How a step's forward pass is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmill.attention.backend import AttentionMetadata
from tokenmill.attention.forward_context import set_forward_context
from tokenmill.models.base import CausalLM


@dataclass(slots=True)
class GraphStats:
    """How often a recording served."""

    num_replayed: int = 0
    num_direct: int = 0


class ForwardPass(Protocol):
    """Runs the model on one flat batch."""

    @property
    def stats(self) -> GraphStats: ...

    def run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn_metadata: Mapping[str, AttentionMetadata],
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size]; valid until the next call."""
        ...


Recorder = Callable[[CausalLM, torch.Tensor, Mapping[str, AttentionMetadata]], ForwardPass]
"""Records a model's forward pass on the position buffer and the metadata of a full step."""


class DirectForward:
    """The model's own forward, kernel by kernel."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self.stats = GraphStats()

    def run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn_metadata: Mapping[str, AttentionMetadata],
    ) -> torch.Tensor:
        self.stats.num_direct += 1
        with set_forward_context(attn_metadata):
            hidden_states = self._model.forward(input_ids, positions)
        assert isinstance(hidden_states, torch.Tensor), "the last rank ends in hidden states"
        return hidden_states
