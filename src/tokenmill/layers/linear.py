"""Linear layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.linear_method import Activations
from tokenmill.layers.weights import (
    WeightSlot,
    empty_parameter,
    parameter_slot,
    transposed_slot,
)
from tokenmill.parallel.shares import Share


class Linear(nn.Module):
    """One projection, or several of the same input computed as one.

    `out_features` of a merged layer maps the names of its parts, as the checkpoint has them beside
    this layer's own, to their sizes: `{"q_proj": 576, "k_proj": 192, "v_proj": 192}`.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        kernels: LayerKernels,
        is_transposed: bool = False,
    ) -> None:
        """With `is_transposed`, the checkpoint has [in_features, out_features] (GPT-2)."""
        super().__init__()
        self.parts = out_features if isinstance(out_features, Mapping) else {"": out_features}
        self.in_features = in_features
        self.out_features = sum(self.parts.values())
        self.dtype = dtype
        self.is_transposed = is_transposed
        self.method = kernels.linear_method(self.out_features, in_features, dtype)
        self.bias = (
            empty_parameter(self.out_features, dtype=self.method.bias_dtype) if bias else None
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        parent = prefix.rpartition(".")[0]
        start = 0
        for part, size in self.parts.items():
            name = f"{parent}.{part}" if part else prefix
            rows = slice(start, start + size)
            slot = self.method.slot(f"{name}.weight", rows)
            yield transposed_slot(slot) if self.is_transposed else slot
            if self.bias is not None:
                yield parameter_slot(f"{name}.bias", self.bias[rows])
            start += size

    def row_shares(self) -> list[list[Share]]:
        """Of each part's tensor the rows that are here, one behind the other."""
        return [[Share(size, 0, size)] for size in self.parts.values()]

    def column_share(self) -> Share:
        """Of the inputs those that are here."""
        return Share(self.in_features, 0, self.in_features)

    def empty_input(self, num_rows: int) -> Activations:
        """A place for this layer's input, in the form in which it is read."""
        return self.method.empty_input(num_rows)

    def forward(self, x: Activations) -> torch.Tensor:
        """Project x [N, in_features] to [N, out_features], parts side by side."""
        return self.method.project(x, self.bias, self.dtype)
