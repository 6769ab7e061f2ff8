"""How a layer keeps a weight matrix and multiplies with it: the seam for weight formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tokenmill.kernels.float8_rows import Float8Rows
from tokenmill.kernels.gemm import QuantizedRows
from tokenmill.layers.weights import WeightSlot

Activations = torch.Tensor | QuantizedRows | Float8Rows
"""Rows that go into a product: plain [N, in_features], or quantised as the weights want them."""


class StreamReader(Protocol):
    """What says in which form it reads the residual stream."""

    def empty_input(self, num_rows: int) -> Activations:
        """Where whoever makes the input may write it, so that it need not be converted again."""
        ...


class WeightPlace(Protocol):
    """Where a weight matrix [out_features, in_features] goes."""

    bias_dtype: torch.dtype
    """Type in which products with it take a bias."""

    def slot(self, name: str, rows: slice) -> WeightSlot:
        """Where the checkpoint's weight `name` goes, which is these rows of the matrix."""
        ...


class LinearMethod(StreamReader, WeightPlace, Protocol):
    """One weight matrix [out_features, in_features], and products with it."""

    def project(
        self, x: Activations, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Compute x @ weight.T + bias, [N, out_features]; bias [out_features]."""
        ...

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ids, int32 or int64 [N], of the matrix: [N, in_features]."""
        ...


class PartsMethod(Protocol):
    """A weight matrix [out_features, in_features] for each part of a row, and products with all."""

    @property
    def parts(self) -> Sequence[WeightPlace]:
        """By part."""

    def project_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Put x [N, parts, in_features], each part times its matrix, into out [N, parts,
        out_features]. Rows and parts of both may lie apart.
        """
        ...
