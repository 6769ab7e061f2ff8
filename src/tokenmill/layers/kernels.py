"""Which kernels a model's layers run on; chosen once, when the model is built."""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from tokenmill.attention.backend import AttentionMetadataBuilder
from tokenmill.errors import ConfigError
from tokenmill.kernels import native
from tokenmill.kernels.activation import Gate
from tokenmill.kernels.experts import Routing
from tokenmill.kernels.state_space import StateCache, StateSpaceShape, StateSpaceWeights
from tokenmill.layers.experts import ExpertShape, ExpertsMethod
from tokenmill.layers.linear_method import Activations, LinearMethod, PartsMethod
from tokenmill.layers.packed import NativeKernels
from tokenmill.layers.plain import PlainKernels
from tokenmill.layers.state_steps import StateSpace
from tokenmill.parallel.group import SOLO, TensorGroup
from tokenmill.quantization.packed_blocks import Quantization

NATIVE_DTYPES = ("bfloat16", "float32")
"""Types of activations that the native kernels know."""


class LayerKernels(Protocol):
    """What layers are made of, in one arithmetic."""

    device: torch.device
    """Where parameters and activations lie."""
    has_torch_path: bool
    """Whether layers without a kernel may compute with torch: whether that is exact there."""
    group: TensorGroup
    """The ranks that have parts of the same layers."""

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

    def experts_method(self, shape: ExpertShape) -> ExpertsMethod:
        """Places for the matrices of a layer's experts."""
        ...

    def route(
        self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights float32, experts), both [N, num_chosen], best first, of float32 logits
        [N, experts] and a bias [experts] on scores.
        """
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

    def head_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm of each len(weight) values of x [N, num_heads * head_size]; shape and dtype stay.

        Rows of x may lie apart.
        """
        ...

    def gated_activation(self, gate_up: torch.Tensor, gate: Gate, out: Activations) -> None:
        """Put activation(first half) * second half of gate_up [N, 2 * size] into `out`."""
        ...

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out: Activations,
    ) -> torch.Tensor:
        """As `add_rms_norm`, with LayerNorm."""
        ...

    def add_residual(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: Activations
    ) -> torch.Tensor:
        """As `add_rms_norm`, with the sum itself in `out`."""
        ...

    def activation(self, x: torch.Tensor, gate: Gate, out: Activations) -> None:
        """Put the activation of x [N, size] into `out`."""
        ...

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x * normal_cdf(x), of any shape, in float32, rounded once to x's dtype."""
        ...

    def add_rows(self, x: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Add table[rows] to x [N, size]: float32.

        The table is float32 [any, size], rows are int64 [N].
        """
        ...

    def copy(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Copy x [N, parts, size] into out of that shape; rows and parts of both may lie apart."""
        ...

    def parts_method(
        self, num_parts: int, out_features: int, in_features: int, dtype: torch.dtype
    ) -> PartsMethod:
        """Places for the matrices of the parts of rows."""
        ...

    def state_builder(self, block_size: int, num_blocks: int) -> AttentionMetadataBuilder:
        """What prepares a step for `state_space`."""
        ...

    def state_space(
        self, shape: StateSpaceShape, weights: StateSpaceWeights, cache: StateCache
    ) -> StateSpace:
        """A state-space layer with its states, as `kernels/state_space.py` says."""
        ...


def uses_native_kernels(dtype: str) -> bool:
    """Whether models of this dtype run on the native kernels here."""
    return dtype in NATIVE_DTYPES and native.is_available()


def require_torch_path(kernels: LayerKernels, what: str) -> None:
    """Raise `ConfigError` where `what`, which has no kernel, cannot be computed with torch."""
    if not kernels.has_torch_path:
        raise ConfigError(
            f"{what} has no kernel for a GPU yet, and torch's would not give the same bits in every"
            f" batch. Run this model with device='cpu'."
        )


def tower_kernels(kernels: LayerKernels, dtype: torch.dtype) -> LayerKernels:
    """The kernels of what makes embeddings beside a decoder that runs on `kernels`.

    They quantise nothing. On a GPU they are torch's: an item is encoded by itself, so that sums
    whose order depends on the number of rows always have the same.
    """
    if isinstance(kernels, NativeKernels):
        return layer_kernels(dtype)
    return PlainKernels(kernels.device)


@functools.cache
def layer_kernels(
    dtype: torch.dtype, quantization: Quantization | None = None, group: TensorGroup = SOLO
) -> LayerKernels:
    """The native kernels where they can be had, else torch's, which quantise nothing."""
    if uses_native_kernels(str(dtype).removeprefix("torch.")):
        return NativeKernels(quantization, group)
    assert quantization is None
    return PlainKernels(group=group)
