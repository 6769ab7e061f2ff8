"""Which kernels a model's layers run on; chosen once, when the model is built."""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from tokenmill.kernels import native
from tokenmill.layers.linear_method import Activations, LinearMethod
from tokenmill.layers.packed import NativeKernels
from tokenmill.layers.plain import PlainKernels

NATIVE_DTYPES = ("bfloat16", "float32")
"""Types of activations that the native kernels know."""


class LayerKernels(Protocol):
    """What layers are made of, in one arithmetic."""

    device: torch.device
    """Where parameters and activations lie."""

    def empty(self, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for activations [num_rows, size]."""
        ...

    def linear_method(
        self, out_features: int, in_features: int, dtype: torch.dtype
    ) -> LinearMethod:
        """A place for a weight matrix."""
        ...

    def vocab_method(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> LinearMethod:
        """A place for the rows of tokens, to look up or to compare with."""
        ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: Activations,
    ) -> torch.Tensor:
        """Add x [N, size] to the residual (None where the stream begins), and put the sum's RMSNorm
        into `out`. Returns the new residual, float32 of x's shape, perhaps in the old one's place.
        """
        ...

    def silu_and_mul(self, gate_up: torch.Tensor, out: Activations) -> None:
        """Put silu(first half) * second half of gate_up [N, 2 * size] into `out`."""
        ...


def uses_native_kernels(dtype: str) -> bool:
    """Whether models of this dtype run on the native kernels here."""
    return dtype in NATIVE_DTYPES and native.is_available()


@functools.cache
def layer_kernels(dtype: torch.dtype) -> LayerKernels:
    """The native kernels where they can be had, else torch's."""
    if uses_native_kernels(str(dtype).removeprefix("torch.")):
        return NativeKernels()
    return PlainKernels()
