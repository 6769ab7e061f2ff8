"""Pieces of an image to vectors: a convolution whose steps are as long as its window."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import nn

from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.weights import (
    WeightSlot,
    empty_parameter,
    flattened_slot,
    parameter_slot,
)


class PatchEmbedding(nn.Module):
    """One projection of all values of a patch."""

    bias: nn.Parameter | None

    def __init__(
        self,
        patch_shape: tuple[int, ...],
        hidden_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        kernels: LayerKernels,
    ) -> None:
        """`patch_shape` is (channels, height, width), or more, as the checkpoint's weight
        [hidden_size, *patch_shape] has it.
        """
        super().__init__()
        self.weight_shape = (hidden_size, *patch_shape)
        self.dtype = dtype
        self.method = kernels.linear_method(hidden_size, prod(patch_shape), dtype)
        self.bias = empty_parameter(hidden_size, dtype=self.method.bias_dtype) if bias else None

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        slot = self.method.slot(f"{prefix}.weight", slice(0, self.weight_shape[0]))
        yield flattened_slot(slot, self.weight_shape)
        if self.bias is not None:
            yield parameter_slot(f"{prefix}.bias", self.bias)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Project [N, values of a patch] of any dtype to [N, hidden_size]."""
        return self.method.project(patches.to(self.dtype), self.bias, self.dtype)


def cut_patches(image: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Cut image [channels, height, width] into patches, row by row: [N, values of a patch].

    What is left over at the right and at the bottom is dropped.
    """
    channels, height, width = image.shape
    rows, columns = height // patch_size, width // patch_size
    image = image[:, : rows * patch_size, : columns * patch_size]
    grid = image.reshape(channels, rows, patch_size, columns, patch_size)
    return grid.permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)
