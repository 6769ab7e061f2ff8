"""State-space layers on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.attention.backend import AttentionMetadata, CommonAttentionMetadata
from tokenmill.kernels.float8_rows import Float8Rows
from tokenmill.kernels.gpu.row_quantization import quantize_rows
from tokenmill.kernels.gpu.state_space import state_space
from tokenmill.kernels.state_space import StateCache, StateSpaceShape, StateSpaceWeights
from tokenmill.layers.linear_method import Activations


@dataclass(frozen=True, slots=True)
class GpuStateMetadata:
    """One step; its tables are on the device."""

    common: CommonAttentionMetadata
    block_size: int


class GpuStateBuilder:
    """Passes a step's tables on."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def build(self, common: CommonAttentionMetadata) -> GpuStateMetadata:
        return GpuStateMetadata(common, self._block_size)


class GpuStateSpace:
    """One layer with its states."""

    def __init__(
        self, shape: StateSpaceShape, weights: StateSpaceWeights, cache: StateCache
    ) -> None:
        self._shape = shape
        self._weights = weights
        self._cache = cache

    def run(self, metadata: AttentionMetadata, projected: torch.Tensor, out: Activations) -> None:
        assert isinstance(metadata, GpuStateMetadata)
        common = metadata.common
        plain = out
        if isinstance(out, Float8Rows):
            plain = projected.new_empty(len(projected), self._shape.num_inner)
        assert isinstance(plain, torch.Tensor)
        state_space(
            self._shape,
            self._weights,
            self._cache,
            (common.query_start_loc, common.seq_lens, common.block_table),
            metadata.block_size,
            projected,
            plain,
        )
        if isinstance(out, Float8Rows):
            quantize_rows(plain, out.codes, out.scales)
