"""What kernels of layers have in common that compute row by row with torch."""

from __future__ import annotations

import torch

from tokenmill.attention.backend import AttentionMetadataBuilder
from tokenmill.kernels.activation import Gate, activation
from tokenmill.kernels.gelu import gelu
from tokenmill.kernels.norm import layer_norm
from tokenmill.kernels.state_space import StateCache, StateSpaceShape, StateSpaceWeights
from tokenmill.layers.linear_method import Activations
from tokenmill.layers.state_steps import StateMetadataBuilder, StateSpace, TorchStateSpace


class TorchRows:
    """The rarer kernels of `LayerKernels`, in torch.

    On a GPU, sums of LayerNorm would depend on the number of rows: its kernels have their own.
    """

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out: Activations,
    ) -> torch.Tensor:
        assert isinstance(out, torch.Tensor)
        residual = x.float() if residual is None else residual + x
        out.copy_(layer_norm(residual, weight, bias, eps))
        return residual

    def add_residual(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: Activations
    ) -> torch.Tensor:
        assert isinstance(out, torch.Tensor)
        residual = x.float() if residual is None else residual + x
        out.copy_(residual)
        return residual

    def activation(self, x: torch.Tensor, gate: Gate, out: Activations) -> None:
        assert isinstance(out, torch.Tensor)
        out.copy_(activation(x, gate))

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(x)

    def add_rows(self, x: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x + table[rows]

    def copy(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)

    def state_builder(self, block_size: int, num_blocks: int) -> AttentionMetadataBuilder:
        return StateMetadataBuilder(block_size)

    def state_space(
        self, shape: StateSpaceShape, weights: StateSpaceWeights, cache: StateCache
    ) -> StateSpace:
        return TorchStateSpace(shape, weights, cache)
