"""Layers on an NVIDIA GPU: the Triton kernels of `kernels/gpu`, and cuBLAS's products.

Activations have the model's dtype, the residual stream is float32. Nothing here reads a device
value on the host, so that a forward pass can be captured in a graph.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tokenmill.kernels.gpu.activation import gated_activation
from tokenmill.kernels.gpu.gemm_bf16 import matmul_exact
from tokenmill.kernels.gpu.gemm_config import SplitWorkspace
from tokenmill.kernels.gpu.norm import add_rms_norm
from tokenmill.kernels.linear import linear_float32
from tokenmill.layers.linear_method import Activations, LinearMethod
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot


class GpuKernels:
    """The kernels of a layer on one device and one stream."""

    def __init__(self, device: torch.device, *, exact: bool, most_own_rows: int = 0) -> None:
        """With `exact`, a row's result does not depend on how many rows there are.

        Without it, products of at most `most_own_rows` rows run on our kernel nevertheless, larger
        ones on cuBLAS, which chooses another order of summation for another number of rows.
        """
        self.device = device
        self.exact = exact
        self.most_own_rows = most_own_rows
        self.workspace = SplitWorkspace.allocate(device)

    def empty(self, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, size, dtype=dtype, device=self.device)

    def linear_method(
        self, out_features: int, in_features: int, dtype: torch.dtype
    ) -> LinearMethod:
        return GpuLinearMethod(out_features, in_features, dtype, self)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: Activations,
    ) -> torch.Tensor:
        assert isinstance(out, torch.Tensor)
        starts_stream = residual is None
        if residual is None:
            residual = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        add_rms_norm(x, residual, weight, eps, out, starts_stream=starts_stream)
        return residual

    def silu_and_mul(self, gate_up: torch.Tensor, out: Activations) -> None:
        assert isinstance(out, torch.Tensor)
        gated_activation(gate_up, "silu", out)


class GpuLinearMethod(nn.Module):
    """A matrix in the activations' dtype, on the device."""

    def __init__(
        self, out_features: int, in_features: int, dtype: torch.dtype, kernels: GpuKernels
    ) -> None:
        super().__init__()
        with kernels.device:
            self.weight = empty_parameter(out_features, in_features, dtype=dtype)
        self.bias_dtype = dtype
        self._kernels = kernels

    def slot(self, name: str, rows: slice) -> WeightSlot:
        return parameter_slot(name, self.weight[rows])

    def empty_input(self, num_rows: int) -> torch.Tensor:
        return self.weight.new_empty(num_rows, self.weight.shape[1])

    def project(
        self, x: Activations, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if self._kernels.exact or len(x) <= self._kernels.most_own_rows:
            out = x.new_empty(len(x), len(self.weight), dtype=out_dtype)
            matmul_exact(x, self.weight, bias, out, self._kernels.workspace)
            return out
        if out_dtype == self.weight.dtype:
            return functional.linear(x, self.weight, bias)
        assert bias is None
        return _linear_float32(x, self.weight)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight)


def _linear_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute x @ weight.T in float32, without a float32 copy of the weight on a GPU."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return linear_float32(x, weight)
