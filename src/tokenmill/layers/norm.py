"""Normalisation, fused with the residual addition in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.linear_method import Activations
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot


class RMSNorm(nn.Module):
    """Adds a block's output to the residual stream, and normalises the sum for the next block.

    Weight and residual are float32. The result is written where `empty_out(num_rows)` says: with
    the `empty_input` of the layer that reads it, it is made in the form in which it is read. By
    default it is plain, in `dtype`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        kernels: LayerKernels,
        empty_out: Callable[[int], Activations] | None = None,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(hidden_size, dtype=torch.float32)
        self.eps = eps
        self.kernels = kernels
        self.empty_out = empty_out or (lambda num_rows: kernels.empty(num_rows, hidden_size, dtype))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield parameter_slot(f"{prefix}.weight", self.weight)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Activations, torch.Tensor]:
        """Normalised [N, hidden_size], and the new residual, float32 of that shape.

        The new residual is `residual + x`, or `x` where the stream begins; it may take the place of
        the old one.
        """
        out = self.empty_out(len(x))
        residual = self.kernels.add_rms_norm(x, residual, self.weight, self.eps, out)
        return out, residual
