"""Weights as they are, multiplied by torch: the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tokenmill.kernels.activation import Gate, gated_activation
from tokenmill.kernels.experts import Routing, route_reference
from tokenmill.kernels.linear import linear, linear_float32
from tokenmill.kernels.norm import rms_norm
from tokenmill.layers.experts import ExpertShape, PlainExperts
from tokenmill.layers.linear_method import Activations
from tokenmill.layers.torch_rows import TorchRows
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot
from tokenmill.parallel.group import SOLO, TensorGroup


class PlainLinearMethod(nn.Module):
    """A matrix in the activations' dtype."""

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, dtype=dtype)
        self.bias_dtype = dtype

    def slot(self, name: str, rows: slice) -> WeightSlot:
        return parameter_slot(name, self.weight[rows])

    def empty_input(self, num_rows: int) -> torch.Tensor:
        return self.weight.new_empty(num_rows, self.weight.shape[1])

    def project(
        self, x: Activations, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if out_dtype == self.weight.dtype:
            return linear(x, self.weight, bias)
        product = linear_float32(x, self.weight)
        return product if bias is None else product + bias

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]


@dataclass(frozen=True, slots=True)
class PlainParts:
    """A matrix for each part of a row."""

    parts: Sequence[PlainLinearMethod]

    def project_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for part, method in enumerate(self.parts):
            out[:, part] = method.project(x[:, part].contiguous(), None, out.dtype)


class PlainKernels(TorchRows):
    """Every kernel of a layer in torch."""

    has_torch_path = True

    def __init__(self, device: torch.device | None = None, group: TensorGroup = SOLO) -> None:
        """`device` is the CPU by default."""
        self.device = device or torch.device("cpu")
        self.group = group

    def empty(self, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, size, dtype=dtype, device=self.device)

    def linear_method(
        self, out_features: int, in_features: int, dtype: torch.dtype
    ) -> PlainLinearMethod:
        return PlainLinearMethod(out_features, in_features, dtype)

    def vocab_method(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype
    ) -> PlainLinearMethod:
        return self.linear_method(vocab_size, hidden_size, dtype)

    def parts_method(
        self, num_parts: int, out_features: int, in_features: int, dtype: torch.dtype
    ) -> PlainParts:
        methods = [self.linear_method(out_features, in_features, dtype) for _ in range(num_parts)]
        return PlainParts(methods)

    def experts_method(self, shape: ExpertShape) -> PlainExperts:
        return PlainExperts(shape, self.linear_method)

    def route(
        self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return route_reference(logits, routing, bias)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: Activations,
    ) -> torch.Tensor:
        assert isinstance(out, torch.Tensor)
        residual = x.float() if residual is None else residual + x
        out.copy_(rms_norm(residual, weight, eps))
        return residual

    def head_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        heads = x.float().reshape(len(x), -1, len(weight))
        return rms_norm(heads, weight, eps).flatten(-2).to(x.dtype)

    def gated_activation(self, gate_up: torch.Tensor, gate: Gate, out: Activations) -> None:
        assert isinstance(out, torch.Tensor)
        out.copy_(gated_activation(gate_up, gate))
