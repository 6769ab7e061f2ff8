"""Linear layers, and the seam at which other weight formats come in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import nn

from tokenmill.kernels.linear import linear
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot


class LinearMethod(Protocol):
    """How a linear layer keeps its weights and multiplies with them."""

    def create_weights(self, layer: Linear) -> None:
        """Register the layer's parameters, empty."""
        ...

    def weight_slot(self, layer: Linear, name: str, rows: slice) -> WeightSlot:
        """Where the checkpoint's weight `name` goes, which is these rows of the layer's."""
        ...

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Project x [N, in_features] to [N, out_features], in x's dtype."""
        ...


class PlainLinearMethod:
    """Weights as they are, in the activations' dtype."""

    def create_weights(self, layer: Linear) -> None:
        layer.weight = empty_parameter(layer.out_features, layer.in_features, dtype=layer.dtype)

    def weight_slot(self, layer: Linear, name: str, rows: slice) -> WeightSlot:
        return parameter_slot(name, layer.weight[rows])

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return linear(x, layer.weight, layer.bias)


class Linear(nn.Module):
    """One projection, or several of the same input computed as one.

    `out_features` of a merged layer maps the names of its parts, as the checkpoint has them beside
    this layer's own, to their sizes: `{"q_proj": 576, "k_proj": 192, "v_proj": 192}`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        method: LinearMethod,
    ) -> None:
        super().__init__()
        self.parts = out_features if isinstance(out_features, Mapping) else {"": out_features}
        self.in_features = in_features
        self.out_features = sum(self.parts.values())
        self.dtype = dtype
        self.method = method
        self.bias = empty_parameter(self.out_features, dtype=dtype) if bias else None
        method.create_weights(self)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        parent = prefix.rpartition(".")[0]
        start = 0
        for part, size in self.parts.items():
            name = f"{parent}.{part}" if part else prefix
            rows = slice(start, start + size)
            yield self.method.weight_slot(self, f"{name}.weight", rows)
            if self.bias is not None:
                yield parameter_slot(f"{name}.bias", self.bias[rows])
            start += size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project x [N, in_features] to [N, out_features], parts side by side."""
        return self.method.apply(self, x)
