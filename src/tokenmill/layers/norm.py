"""Normalisation: of the residual stream, fused with the addition in front of it, and of heads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.linear_method import Activations
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot
from tokenmill.parallel.shares import Share


class RMSNorm(nn.Module):
    """Adds a block's output to the residual stream, and normalises the sum for the next block.

    Weight and residual are float32. The result is written where `empty_out(num_rows)` says: with
    the `empty_input` of the layer that reads it, it is made in the form in which it is read. By
    default it is plain, in `dtype`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        kernels: LayerKernels,
        empty_out: Callable[[int], Activations] | None = None,
        weight_offset: float = 0.0,
    ) -> None:
        """`weight_offset` is added to the checkpoint's weight (1 for Gemma)."""
        super().__init__()
        self.weight = empty_parameter(hidden_size, dtype=torch.float32)
        self.weight_offset = weight_offset
        self.eps = eps
        self.kernels = kernels
        self.empty_out = empty_out or (lambda num_rows: kernels.empty(num_rows, hidden_size, dtype))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield parameter_slot(f"{prefix}.weight", self.weight, self.weight_offset)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Activations, torch.Tensor]:
        """Normalised [N, hidden_size], and the new residual, float32 of that shape.

        The new residual is `residual + x`, or `x` where the stream begins; it may take the place of
        the old one.
        """
        out = self.empty_out(len(x))
        residual = self.kernels.add_rms_norm(x, residual, self.weight, self.eps, out)
        return out, residual


class BranchRMSNorm(RMSNorm):
    """RMSNorm of what is no residual stream: a block's output, all queries of a token."""

    def forward(self, x: torch.Tensor) -> Activations:  # type: ignore[override]
        """Normalised x, [N, hidden_size]."""
        return super().forward(x)[0]

    def in_place(self, x: torch.Tensor) -> None:
        """Normalise x, [N, hidden_size], whose rows may lie apart."""
        self.kernels.add_rms_norm(x, None, self.weight, self.eps, x)


class GatheredRMSNorm(BranchRMSNorm):
    """RMSNorm over all heads of a token, of which each rank of a group has some.

    A norm of rows that are put together from all ranks has the bits of one process; a sum of the
    ranks' squares would not.
    """

    def __init__(self, share: Share, eps: float, **settings: Any) -> None:
        """`share` are the columns of this rank. Ranks that have the same ones put in a part each.
        `settings` are those of `RMSNorm`.
        """
        super().__init__(share.total, eps, **settings)
        self.group = self.kernels.group
        self.share = share
        num_equal = self.group.size * share.size // share.total
        bounds = [part * share.size // num_equal for part in range(num_equal + 1)]
        parts = [slice(*each) for each in itertools.pairwise(bounds)]
        self.part = parts[self.group.rank % num_equal]
        self.widths = [part.stop - part.start for part in parts] * (self.group.size // num_equal)

    def forward(self, x: torch.Tensor) -> Activations:  # type: ignore[override]
        """Normalised x, this rank's columns [N, share.size]."""
        if self.share.is_whole:
            return super().forward(x)
        part = x[:, self.part]
        own = self.kernels.empty(len(x), part.shape[1], torch.float32)
        self.kernels.copy(part[:, None], own[:, None])
        out = super().forward(self.group.all_gather(own, self.widths))
        assert isinstance(out, torch.Tensor), "what attention reads is plain"
        return out[:, self.share.start : self.share.stop]


class HeadRMSNorm(nn.Module):
    """RMSNorm of each head by itself, with one weight for all heads."""

    def __init__(
        self, head_size: int, eps: float, *, kernels: LayerKernels, weight_offset: float = 0.0
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(head_size, dtype=torch.float32)
        self.weight_offset = weight_offset
        self.eps = eps
        self.kernels = kernels

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield parameter_slot(f"{prefix}.weight", self.weight, self.weight_offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalised x, [N, num_heads * head_size]."""
        return self.kernels.head_rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """As `RMSNorm`, with mean and bias."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        kernels: LayerKernels,
        empty_out: Callable[[int], Activations] | None = None,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(hidden_size, dtype=torch.float32)
        self.bias = empty_parameter(hidden_size, dtype=torch.float32)
        self.eps = eps
        self.kernels = kernels
        self.empty_out = empty_out or (lambda num_rows: kernels.empty(num_rows, hidden_size, dtype))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield parameter_slot(f"{prefix}.weight", self.weight)
        yield parameter_slot(f"{prefix}.bias", self.bias)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Activations, torch.Tensor]:
        """Normalised [N, hidden_size], and the new residual, as of `RMSNorm`."""
        out = self.empty_out(len(x))
        residual = self.kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps, out)
        return out, residual


class ResidualAdd(nn.Module):
    """The residual stream as it is: for blocks that read it without a norm."""

    def __init__(self, kernels: LayerKernels, empty_out: Callable[[int], Activations]) -> None:
        """`empty_out` makes room for what is read, the `empty_input` of the block."""
        super().__init__()
        self.kernels = kernels
        self.empty_out = empty_out

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Activations, torch.Tensor]:
        """The new residual as it is read, and in float32: [N, hidden_size]."""
        out = self.empty_out(len(x))
        return out, self.kernels.add_residual(x, residual, out)
