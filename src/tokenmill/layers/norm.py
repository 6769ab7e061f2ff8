"""Normalisation, fused with the residual addition in front of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from tokenmill.kernels.norm import rms_norm
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot


class RMSNorm(nn.Module):
    """Adds a block's output to the residual stream, and normalises the sum for the next block.

    Weight and residual are float32; only what goes into the next block is rounded to `dtype`.
    """

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(hidden_size, dtype=torch.float32)
        self.eps = eps
        self.dtype = dtype

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield parameter_slot(f"{prefix}.weight", self.weight)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised [N, hidden_size] in `dtype`, and the new residual, float32 of that shape.

        The new residual is `residual + x`, or `x` where the stream begins.
        """
        residual = x.float() if residual is None else residual + x
        return rms_norm(residual, self.weight, self.eps).to(self.dtype), residual
