"""A matrix for each part of a row, on a GPU: all in one tensor, one launch for all products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from tokenmill.kernels.gpu.gemm_parts import matmul_parts
from tokenmill.layers.linear_method import WeightPlace
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot

if TYPE_CHECKING:
    from tokenmill.layers.gpu import GpuKernels


class PartPlace:
    """One part's matrix in the tensor of all."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.bias_dtype = weight.dtype
        self._weight = weight

    def slot(self, name: str, rows: slice) -> WeightSlot:
        return parameter_slot(name, self._weight[rows])


class GpuParts(nn.Module):
    """Plain matrices in the activations' dtype, whatever others become: they are small."""

    def __init__(
        self,
        num_parts: int,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        kernels: GpuKernels,
    ) -> None:
        super().__init__()
        with kernels.device:
            self.weight = empty_parameter(num_parts, out_features, in_features, dtype=dtype)

    @property
    def parts(self) -> Sequence[WeightPlace]:
        return [PartPlace(weight) for weight in self.weight]

    def project_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        matmul_parts(x, self.weight, out)
