"""Token embeddings, and the output head over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from tokenmill.kernels.linear import linear_float32
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot


class VocabEmbedding(nn.Module):
    """One row per token, to look up or to compare with."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield parameter_slot(f"{prefix}.weight", self.weight)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids, int32 or int64 [N], to their rows [N, hidden_size]."""
        return self.weight[input_ids]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [N, hidden_size] to float32 logits [N, vocab_size]."""
        return linear_float32(hidden_states, self.weight)
