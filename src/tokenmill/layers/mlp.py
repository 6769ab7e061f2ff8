"""Feed-forward blocks."""

from __future__ import annotations

import torch
from torch import nn

from tokenmill.kernels.activation import Gate
from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.linear_method import Activations
from tokenmill.layers.parallel_linear import ColumnParallelLinear, RowParallelLinear
from tokenmill.parallel.shares import even_share

GATED_MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


class GatedMLP(nn.Module):
    """A block of down(activation(gate(x)) * up(x)), gate and up computed as one projection."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        kernels: LayerKernels,
        gate: Gate = "silu",
        is_fused: bool = False,
        names: tuple[str, str, str] = GATED_MLP_NAMES,
    ) -> None:
        """`names` are those of the gate, up and down matrices in the checkpoint.

        With `is_fused`, it has one matrix `gate_up_proj` of the first two, the gates in front.
        """
        super().__init__()
        self.kernels = kernels
        self.gate = gate
        share = even_share(intermediate_size, kernels.group.rank, kernels.group.size)
        self.gate_up_proj = ColumnParallelLinear(
            hidden_size,
            [share, share] if is_fused else dict.fromkeys(names[:2], share),
            bias=bias,
            dtype=dtype,
            kernels=kernels,
        )
        self.down_proj = RowParallelLinear(
            share, {names[2]: hidden_size}, bias=bias, dtype=dtype, kernels=kernels
        )

    def empty_input(self, num_rows: int) -> Activations:
        """A place for this block's input, in the form in which it is read."""
        return self.gate_up_proj.empty_input(num_rows)

    def forward(self, x: Activations) -> torch.Tensor:
        """Map x [N, hidden_size] to the same shape."""
        gate_up = self.gate_up_proj(x)
        activated = self.down_proj.empty_input(len(gate_up))
        self.kernels.gated_activation(gate_up, self.gate, activated)
        return self.down_proj(activated)  # type: ignore[no-any-return]
