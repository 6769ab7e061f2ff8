"""Which states a step reads and writes, and what computes a layer with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmill.attention.backend import AttentionMetadata, CommonAttentionMetadata
from tokenmill.kernels.state_space import (
    StateCache,
    StateSpaceShape,
    StateSpaceWeights,
    StateStep,
    state_space,
)
from tokenmill.layers.linear_method import Activations


class StateSpace(Protocol):
    """One layer with its states, on some kernels."""

    def run(self, metadata: AttentionMetadata, projected: torch.Tensor, out: Activations) -> None:
        """Compute a step.

        projected is [num_tokens, gates, inputs and dt], out [num_tokens, num_heads * head_size].
        """
        ...


class TorchStateSpace:
    """In torch."""

    def __init__(
        self, shape: StateSpaceShape, weights: StateSpaceWeights, cache: StateCache
    ) -> None:
        self._shape = shape
        self._weights = weights
        self._cache = cache

    def run(self, metadata: AttentionMetadata, projected: torch.Tensor, out: Activations) -> None:
        assert isinstance(metadata, StateMetadata)
        assert isinstance(out, torch.Tensor)
        out.copy_(state_space(self._shape, self._weights, self._cache, metadata.steps, projected))


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """One step, for all state-space layers."""

    steps: list[StateStep]


class StateMetadataBuilder:
    """Finds the blocks that a step reads and writes."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def build(self, common: CommonAttentionMetadata) -> StateMetadata:
        starts = common.query_start_loc.tolist()
        steps = []
        for req, seq_len in enumerate(common.seq_lens.tolist()):
            rows = slice(starts[req], starts[req + 1])
            num_seen = seq_len - (rows.stop - rows.start)
            if rows.stop > rows.start:
                table = common.block_table[req].tolist()
                read_block = table[max(num_seen - 1, 0) // self._block_size]
                steps.append(
                    StateStep(rows, num_seen, read_block, self._writes(table, num_seen, seq_len))
                )
        return StateMetadata(steps)

    def _writes(self, table: list[int], num_seen: int, seq_len: int) -> tuple[tuple[int, int], ...]:
        """Behind whole blocks, and at the end; the null block keeps nothing."""
        size = self._block_size
        ends = [*range((num_seen // size + 1) * size, seq_len, size), seq_len]
        blocks = [(end - num_seen, table[(end - 1) // size]) for end in ends]
        return tuple((num_rows, block) for num_rows, block in blocks if block)
