"""State-space layers on the native kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.attention.backend import AttentionMetadata, CommonAttentionMetadata
from tokenmill.kernels.float8_rows import Float8Rows
from tokenmill.kernels.native_state_space import NativeStateSpace, StatePlan
from tokenmill.kernels.state_space import StateCache, StateSpaceShape, StateSpaceWeights
from tokenmill.layers.linear_method import Activations


@dataclass(frozen=True, slots=True)
class PackedStateMetadata:
    """One step."""

    plan: StatePlan


class PackedStateBuilder:
    """Fills one plan, so that a recorded step finds it."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._metadata = PackedStateMetadata(StatePlan())

    def build(self, common: CommonAttentionMetadata) -> PackedStateMetadata:
        self._metadata.plan.build(
            common.query_start_loc,
            common.seq_lens,
            common.block_table,
            self._block_size,
            self._num_blocks,
        )
        return self._metadata


class PackedStateSpace:
    """One layer with its states."""

    def __init__(
        self, shape: StateSpaceShape, weights: StateSpaceWeights, cache: StateCache
    ) -> None:
        self._native = NativeStateSpace(shape, weights, cache)

    def run(self, metadata: AttentionMetadata, projected: torch.Tensor, out: Activations) -> None:
        assert isinstance(metadata, PackedStateMetadata)
        assert not isinstance(out, Float8Rows)
        self._native.run(metadata.plan, projected, out)
