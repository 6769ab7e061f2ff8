"""Feed-forward blocks."""

from __future__ import annotations

import torch
from torch import nn

from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.linear import Linear
from tokenmill.layers.linear_method import Activations


class GatedMLP(nn.Module):
    """A block of down(silu(gate(x)) * up(x)), gate and up computed as one projection."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        kernels: LayerKernels,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.gate_up_proj = Linear(
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            bias=bias,
            dtype=dtype,
            kernels=kernels,
        )
        self.down_proj = Linear(
            intermediate_size, hidden_size, bias=bias, dtype=dtype, kernels=kernels
        )

    def forward(self, x: Activations) -> torch.Tensor:
        """Map x [N, hidden_size] to the same shape."""
        gate_up = self.gate_up_proj(x)
        activated = self.down_proj.empty_input(len(gate_up))
        self.kernels.silu_and_mul(gate_up, activated)
        return self.down_proj(activated)  # type: ignore[no-any-return]
