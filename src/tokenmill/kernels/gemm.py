"""Matrix products with packed weights: x [M, K] @ weight [N, K].T + bias [N].

    PackedBf16     bfloat16 weights          x bfloat16
    PackedFloat32  float32 weights           x float32
    PackedBlocks   blocks of 4 or 8 bits     x quantised to int8 in groups of 32 values of a row

A row's result has the same bits for any M, any neighbours and any number of threads. Blocks also
give the same bits on each instruction set. Packing takes the place of the weights' own layout:
rows can be read back one by one, for an embedding that shares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils import dlpack

from tokenmill.kernels import arena, native

GROUP_SIZE = 32
"""Values along K that share a scale, in block formats and in quantised rows."""

PANEL_COLUMNS = 32
"""Rows of a weight whose codes lie together. Where N is a multiple of it, the packed forms of two
weights behind one another are that of both."""

BLOCK_VALUES = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"), 32),
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"), 256),
}
"""GGUF types that are packed, and how many values a block has, of which K is a multiple.

What that rounds is in docs/formats.md.
"""
BLOCK_TYPES = tuple(BLOCK_VALUES)

QuantizedType = Literal["Q8_0", "Q4_1"]
"""Block types that plain weights can be quantised to."""


@dataclass(frozen=True, slots=True)
class PackedBf16:
    """Weights in the order in which the kernels read them."""

    buffer: torch.Tensor
    """uint8, in memory of its own (huge pages where the system allows them)."""
    out_features: int
    """N."""
    in_features: int
    """K."""

    @classmethod
    def pack(cls, weight: torch.Tensor, row_index: torch.Tensor | None = None) -> PackedBf16:
        """Copy weight, bfloat16 [N, K]; row i becomes weight[row_index[i]] (int64 [N])."""
        packed = cls.empty(*weight.shape)
        native.module().pack_bf16(weight, packed.buffer, row_index)
        return packed

    @classmethod
    def empty(cls, out_features: int, in_features: int) -> PackedBf16:
        """Zeros [N, K], to be filled."""
        num_bytes = native.module().packed_bf16_bytes(out_features, in_features)
        return cls(_allocate(num_bytes), out_features, in_features)

    def fill(self, first: int, weight: torch.Tensor) -> None:
        """Copy weight, bfloat16 [n, K], to rows [first, first + n); see `_panels`."""
        panels = _panels(self, native.module().packed_bf16_bytes, first, len(weight))
        native.module().pack_bf16(weight, panels, None)

    def unpack_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ids (int32 or int64 [num_ids]) of the weight, float32 [num_ids, K]."""
        out = arena.empty(len(ids), self.in_features, dtype=torch.float32)
        native.module().unpack_bf16_rows(self.buffer, self.out_features, self.in_features, ids, out)
        return out


@dataclass(frozen=True, slots=True)
class PackedFloat32:
    """Weights in the order in which the kernels read them."""

    buffer: torch.Tensor
    """uint8, in memory of its own (huge pages where the system allows them)."""
    out_features: int
    """N."""
    in_features: int
    """K."""

    @classmethod
    def pack(cls, weight: torch.Tensor, row_index: torch.Tensor | None = None) -> PackedFloat32:
        """Copy weight, float32 [N, K]; row i becomes weight[row_index[i]] (int64 [N])."""
        packed = cls.empty(*weight.shape)
        native.module().pack_float32(weight, packed.buffer, row_index)
        return packed

    @classmethod
    def empty(cls, out_features: int, in_features: int) -> PackedFloat32:
        """Zeros [N, K], to be filled."""
        num_bytes = native.module().packed_float32_bytes(out_features, in_features)
        return cls(_allocate(num_bytes), out_features, in_features)

    def fill(self, first: int, weight: torch.Tensor) -> None:
        """Copy weight, float32 [n, K], to rows [first, first + n); see `_panels`."""
        panels = _panels(self, native.module().packed_float32_bytes, first, len(weight))
        native.module().pack_float32(weight, panels, None)

    def unpack_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ids (int32 or int64 [num_ids]) of the weight, float32 [num_ids, K]."""
        out = arena.empty(len(ids), self.in_features, dtype=torch.float32)
        native.module().unpack_float32_rows(
            self.buffer, self.out_features, self.in_features, ids, out
        )
        return out


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """Weights of a GGUF block type, as codes of 4 or 8 bits with a scale for 32 of them."""

    buffer: torch.Tensor
    """uint8, in memory of its own (huge pages where the system allows them)."""
    block_type: str
    """One of BLOCK_TYPES."""
    out_features: int
    """N."""
    in_features: int
    """K, a multiple of BLOCK_VALUES[block_type]."""

    @classmethod
    def pack(
        cls,
        block_type: str,
        raw: torch.Tensor,
        out_features: int,
        in_features: int,
        row_index: torch.Tensor | None = None,
    ) -> PackedBlocks:
        """Copy the blocks of N rows, uint8 [num_bytes], as they follow one another in a file.

        Row i becomes row row_index[i] (int64 [N]). Reads raw once and panel by panel, so a mapped
        file need not be in memory.
        """
        packed = cls.empty(block_type, out_features, in_features)
        native.module().pack_blocks(
            block_type, raw, out_features, in_features, packed.buffer, row_index
        )
        return packed

    @classmethod
    def empty(cls, block_type: str, out_features: int, in_features: int) -> PackedBlocks:
        """Zeros [N, K], to be filled."""
        num_bytes = native.module().packed_blocks_bytes(block_type, out_features, in_features)
        return cls(_allocate(num_bytes), block_type, out_features, in_features)

    def fill(self, first: int, raw: torch.Tensor) -> None:
        """Copy rows of blocks, uint8 [n, bytes of a row], to rows [first, first + n); see
        `_panels`.
        """
        panels = _panels(self, self._num_bytes, first, len(raw))
        native.module().pack_blocks(
            self.block_type, raw.view(-1), len(raw), self.in_features, panels, None
        )

    def fill_quantized(self, first: int, weight: torch.Tensor) -> None:
        """Quantise weight [n, K] as `quantize` does, to rows [first, first + n); see `_panels`."""
        panels = _panels(self, self._num_bytes, first, len(weight))
        native.module().pack_quantized(weight, self.block_type, panels, None)

    def _num_bytes(self, num_rows: int, in_features: int) -> int:
        num_bytes: int = native.module().packed_blocks_bytes(self.block_type, num_rows, in_features)
        return num_bytes

    @staticmethod
    def empty_buffer(num_bytes: int) -> torch.Tensor:
        """Memory for packed blocks."""
        return _allocate(num_bytes)

    @classmethod
    def quantize(
        cls, block_type: QuantizedType, weight: torch.Tensor, row_index: torch.Tensor | None = None
    ) -> PackedBlocks:
        """Quantise weight, bfloat16, float16 or float32 [N, K], with K a multiple of 32.

            Q8_0    8 bits and a scale: the largest magnitude of 32 values is code 127
            Q4_1    4 bits, a scale and a minimum, fitted to 32 values by least squares

        Row i becomes row row_index[i] (int64 [N]).
        """
        packed = cls.empty(block_type, *weight.shape)
        native.module().pack_quantized(weight, block_type, packed.buffer, row_index)
        return packed

    def unpack_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ids (int32 or int64 [num_ids]) of the weight, float32 [num_ids, K]."""
        out = arena.empty(len(ids), self.in_features, dtype=torch.float32)
        native.module().unpack_block_rows(
            self.buffer, self.block_type, self.out_features, self.in_features, ids, out
        )
        return out


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Activations in int8, each group of 32 values of a row on its own scale.

    One buffer, so that a kernel has one address. Rows lie in blocks of 16, as tiles read them; what
    lies behind the last row is undefined. In a block, group after group along K:

        | codes [16, 32] int8 | scales [16] | scaled sums [16] | sums [16] int32 |
    """

    buffer: torch.Tensor
    """uint8, aligned to 64 bytes."""
    num_rows: int
    """M."""
    num_columns: int
    """K, a multiple of 32."""

    @property
    def codes(self) -> torch.Tensor:
        """int8 [M, K]; value = code * scale."""
        return self._part(0, torch.int8, GROUP_SIZE)

    @property
    def scales(self) -> torch.Tensor:
        """float32 [M, K / 32], largest magnitude of the group / 127."""
        return self._part(512, torch.float32, 1)

    @property
    def scaled_sums(self) -> torch.Tensor:
        """float32 [M, K / 32], sum * scale: what a minimum of the weights is multiplied with."""
        return self._part(576, torch.float32, 1)

    @property
    def sums(self) -> torch.Tensor:
        """int32 [M, K / 32], sum of the group's codes."""
        return self._part(640, torch.int32, 1)

    def _part(self, begin: int, dtype: torch.dtype, columns: int) -> torch.Tensor:
        """A copy of what begins at byte `begin` of each group, in the order of rows."""
        num_groups = self.num_columns // GROUP_SIZE
        groups = self.buffer.view(-1, num_groups, 704)
        part = groups[:, :, begin : begin + 16 * columns * dtype.itemsize].contiguous().view(dtype)
        rows = part.view(-1, num_groups, 16, columns).transpose(1, 2)
        return rows.reshape(-1, num_groups * columns)[: self.num_rows].contiguous()


def quantize_rows(x: torch.Tensor) -> QuantizedRows:
    """x, bfloat16 or float32 [M, K], to int8.

    Each code is x * (127 / largest) rounded to the nearest, ties to even. A group whose largest
    magnitude is below 1e-30 becomes zero; the scale of one with a NaN is NaN.
    """
    m, k = x.shape
    num_bytes = native.module().quantized_bytes(m, k)
    quantized = QuantizedRows(arena.empty(num_bytes, dtype=torch.uint8), m, k)
    native.module().quantize_rows(x, quantized.buffer)
    return quantized


def gemm_bf16(
    x: torch.Tensor,
    weight: PackedBf16,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """x, bfloat16 [M, K], to x @ weight.T + bias (float32 [N]), in `out_dtype` or in `out` [M, N].

    Sums are float32; they are rounded once, after the bias, if the result is bfloat16.
    """
    if out is None:
        out = arena.empty(x.shape[0], weight.out_features, dtype=out_dtype)
    native.module().gemm_bf16(x, weight.buffer, weight.out_features, weight.in_features, out, bias)
    return out


def gemm_float32(
    x: torch.Tensor,
    weight: PackedFloat32,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x, float32 [M, K], to x @ weight.T + bias (float32 [N]), float32 or in `out` [M, N].

    Each sum is one fused multiply-add after another along K. `out` may be bfloat16.
    """
    if out is None:
        out = arena.empty(x.shape[0], weight.out_features, dtype=torch.float32)
    native.module().gemm_float32(
        x, weight.buffer, weight.out_features, weight.in_features, out, bias
    )
    return out


def gemm_blocks(
    x: QuantizedRows,
    weight: PackedBlocks,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Quantised rows [M, K] to x @ weight.T + bias (float32 [N]), in `out_dtype` or `out` [M, N].

    Sums within a group are exact, sums of groups float32, rounded once if the result is bfloat16.
    """
    if out is None:
        out = arena.empty(x.num_rows, weight.out_features, dtype=out_dtype)
    native.module().gemm_blocks(
        x.buffer,
        x.num_rows,
        weight.buffer,
        weight.block_type,
        weight.out_features,
        weight.in_features,
        out,
        bias,
    )
    return out


def gemm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What the products approximate: x [M, K] @ weight [N, K].T + bias [N] in float64.

    For blocks, x is what the quantised rows stand for and weight what the blocks stand for.
    """
    product = x.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


def quantize_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 [M, K], scales float32 [M, K / 32]) of x, as `quantize_rows` gives them."""
    groups = x.float().view(x.shape[0], -1, GROUP_SIZE)
    largest = groups.abs().amax(-1)
    nonzero = largest >= 1e-30
    most = torch.tensor(127.0)  # a tensor, as torch divides a plain number by way of 1 / x
    inverse = torch.where(nonzero, most / largest, 0.0)
    codes = (groups * inverse.unsqueeze(-1)).round().to(torch.int8)
    return codes.flatten(-2), torch.where(nonzero, largest / most, 0.0)


def _panels(
    packed: PackedBf16 | PackedFloat32 | PackedBlocks,
    num_bytes: Callable[[int, int], int],
    first: int,
    num_rows: int,
) -> torch.Tensor:
    """The bytes of rows [first, first + num_rows), which must be whole panels, except that the last
    rows of the weight may be fewer.
    """
    end = first + num_rows
    assert first % PANEL_COLUMNS == 0
    assert end % PANEL_COLUMNS == 0 or end == packed.out_features
    begin = num_bytes(first, packed.in_features)
    return packed.buffer[begin : begin + num_bytes(num_rows, packed.in_features)]


def _allocate(num_bytes: int) -> torch.Tensor:
    buffer: torch.Tensor = dlpack.from_dlpack(native.module().allocate_weights(num_bytes))
    return buffer
