"""Embeddings of tokens and of positions, and the output head over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.parallel_linear import rows_slot
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot
from tokenmill.parallel.shares import Share, vocab_parts


class EmbeddingTable(nn.Module):
    """Rows to look up, in float32: of positions, of types."""

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(num_rows, size, dtype=torch.float32)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield parameter_slot(f"{prefix}.weight", self.weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """int64 [N] to float32 [N, size]."""
        return functional.embedding(rows, self.weight)


class VocabEmbedding(nn.Module):
    """One row per token, to look up or to compare with; a rank has those of some tokens."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, kernels: LayerKernels
    ) -> None:
        super().__init__()
        self.group = kernels.group
        parts = vocab_parts(vocab_size, self.group.size)
        self.part = parts[self.group.rank]
        """Tokens whose rows are here."""
        self.widths = [len(part) for part in parts]
        self.vocab_size = vocab_size
        self.method = kernels.vocab_method(len(self.part), hidden_size, dtype)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        slot = self.method.slot(f"{prefix}.weight", slice(0, len(self.part)))
        yield rows_slot(slot, [Share(self.vocab_size, self.part.start, self.part.stop)])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids, int32 or int64 [N], to their rows [N, hidden_size]."""
        return self.group.lookup(input_ids, self.part, self.method.gather)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [N, hidden_size] to float32 logits [N, vocab_size]."""
        logits = self.method.project(hidden_states, None, torch.float32)
        return self.group.all_gather(logits, self.widths)
