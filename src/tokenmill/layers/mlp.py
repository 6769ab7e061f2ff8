"""Feed-forward blocks."""

from __future__ import annotations

import torch
from torch import nn

from tokenmill.kernels.activation import silu_and_mul
from tokenmill.layers.linear import Linear, LinearMethod


class GatedMLP(nn.Module):
    """A block of down(silu(gate(x)) * up(x)), gate and up computed as one projection."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        method: LinearMethod,
    ) -> None:
        super().__init__()
        self.gate_up_proj = Linear(
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            bias=bias,
            dtype=dtype,
            method=method,
        )
        self.down_proj = Linear(
            intermediate_size, hidden_size, bias=bias, dtype=dtype, method=method
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [N, hidden_size] to the same shape."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))  # type: ignore[no-any-return]
