"""Weights in blocks as the native kernels read them: the form that a packed file holds.

Panels of 32 rows of the weight, in groups of 32 values along K; the layout is drawn in
csrc/gemm_kernels.h. Here it is read in torch, for kernels that cannot.
"""

from __future__ import annotations

from typing import Literal

import torch

from tokenmill.kernels.gemm import GROUP_SIZE, PANEL_COLUMNS, QuantizedType

Quantization = Literal["int8", "int4"]

QUANTIZED_TYPES: dict[str, QuantizedType] = {"int8": "Q8_0", "int4": "Q4_1"}
"""The block type that has the codes of a quantisation."""

_HALF = 16
"""Rows of the weight that a vector register holds."""


def group_bytes(block_type: str) -> int:
    """Bytes of 32 values of 32 rows."""
    return PANEL_COLUMNS * {"Q8_0": GROUP_SIZE + 2, "Q4_1": GROUP_SIZE // 2 + 4}[block_type]


def packed_bytes(block_type: str, num_rows: int, num_columns: int) -> int:
    """Bytes of a packed matrix; rows that fill up the last panel included."""
    return -(-num_rows // PANEL_COLUMNS) * (num_columns // GROUP_SIZE) * group_bytes(block_type)


def reorder_rows(
    block_type: str, packed: torch.Tensor, shape: tuple[int, ...], order: torch.Tensor
) -> torch.Tensor:
    """A packed matrix whose row i is row `order[i]` of this one; codes and scales stay.

    `packed` is uint8 [num_bytes] of a matrix [N, K] = shape, and `order` is int64 [N].
    """
    num_rows, num_columns = shape
    groups = packed.view(-1, num_columns // GROUP_SIZE, group_bytes(block_type))
    num_padded = len(groups) * PANEL_COLUMNS
    padded = torch.cat((order, torch.arange(num_rows, num_padded)))
    code_bytes = PANEL_COLUMNS * GROUP_SIZE * (8 if block_type == "Q8_0" else 4) // 8

    def moved(x: torch.Tensor) -> torch.Tensor:  # [panels, groups, any, halves, 16, bytes]
        rows = x.permute(0, 3, 4, 1, 2, 5)
        in_order = rows.reshape(num_padded, -1)[padded].view(rows.shape)
        return in_order.permute(0, 3, 4, 1, 2, 5)

    outer = groups.shape[:2]
    codes = groups[:, :, :code_bytes].reshape(*outer, 2, -1, _HALF, 4).transpose(2, 3)
    scales = groups[:, :, code_bytes:].reshape(*outer, -1, 2, _HALF, 2)
    found = moved(codes).transpose(2, 3).flatten(2), moved(scales).flatten(2)
    return torch.cat(found, dim=2).view(-1)


def unpack(block_type: str, packed: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Values, float32 [N, K] = shape, of a packed matrix, uint8 [num_bytes].

    As `PackedBlocks.unpack_rows` gives them, to the bit.
    """
    num_rows, num_columns = shape
    groups = packed.view(-1, num_columns // GROUP_SIZE, group_bytes(block_type))
    bits = 8 if block_type == "Q8_0" else 4
    code_bytes = PANEL_COLUMNS * GROUP_SIZE * bits // 8
    stored = groups[:, :, :code_bytes]
    if bits == 4:
        stored = stored.reshape(*stored.shape[:2], 2, -1)
        stored = torch.cat((stored & 15, stored >> 4), dim=-1)
    # [panels, groups, halves, quads, columns of a half, values of a quad]
    codes = stored.reshape(*groups.shape[:2], 2, -1, _HALF, 4).view(torch.int8).float()
    halves = groups[:, :, code_bytes:].contiguous().view(torch.float16).float()
    scales = halves.view(*groups.shape[:2], -1, 2, 1, _HALF, 1)
    values = codes * scales[:, :, 0]
    if bits == 4:
        values += scales[:, :, 1]
    in_rows = values.permute(0, 2, 4, 1, 3, 5).reshape(-1, num_columns)
    return in_rows[:num_rows].contiguous()
