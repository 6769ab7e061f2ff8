"""The grouped product of experts in four bits (`four_bit_experts.py`), for `moe.py`.

Weights become bfloat16 in registers, on their way to the matrix unit, whose first operand they are.
A row's sum is float32, along K in steps of 64, in one order whatever the other rows are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.dot import IS_INTERPRETED, dot
from tokenmill.kernels.gpu.four_bit_experts import GROUP_SIZE, FourBitExperts
from tokenmill.kernels.gpu.gemm_int4 import dequantize_int4
from tokenmill.kernels.gpu.gemm_tiles import tile_of_program
from tokenmill.kernels.gpu.launch import CompileCase, cdiv
from tokenmill.kernels.gpu.moe_order import ExpertOrder
from tokenmill.kernels.gpu.moe_tiles import MoeTile, rows_of_tile, store_rows

_HALF = tl.constexpr(GROUP_SIZE)
"""Values of a step in the low halves of its bytes: a group; the high halves have the next one."""
_STEP = tl.constexpr(2 * GROUP_SIZE)
_TWO_TO_126 = tl.constexpr(2.0**126)

TILES = {
    tile.block_m: tile
    for tile in (
        MoeTile(16, 64, 64, 4, 6),
        MoeTile(32, 64, 64, 4, 5),
        MoeTile(64, 128, 64, 8, 4),
        MoeTile(128, 128, 64, 8, 3),
    )
}
"""By rows of one expert; to be tuned on a device."""


def grouped_matmul_four_bit(
    x: torch.Tensor,
    weight: FourBitExperts,
    order: ExpertOrder,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    pairs_per_token: int | None = None,
) -> None:
    """`grouped_matmul` of `moe.py`, of bfloat16 x and experts in four bits."""
    num_rows, (_, num_columns, depth) = len(order.pair_of_row), weight.shape
    tile = TILES[order.block_m]
    assert x.dtype == torch.bfloat16
    assert x.shape == (num_rows // (pairs_per_token or 1), depth)
    assert out.shape == (num_rows, num_columns)
    assert all(t.is_contiguous() for t in (x, out))
    assert bias is None or (bias.shape == weight.shape[:2] and bias.is_contiguous())
    num_tiles = order.tiles.shape[1]
    if num_tiles == 0 or num_columns == 0:
        return
    _grouped_four_bit_kernel[(num_tiles * cdiv(num_columns, tile.block_n),)](
        x,
        weight.codes,
        weight.scales,
        bias,
        order.pair_of_row,
        order.tiles,
        out,
        num_tiles,
        num_columns,
        depth,
        weight.codes.shape[2],
        PAIRS_PER_TOKEN=pairs_per_token or 0,
        IS_MXFP4=weight.is_mxfp4,
        EVEN=depth % _STEP.value == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        GROUP_M=tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def grouped_matmul_four_bit_reference(
    x: torch.Tensor,
    weight: FourBitExperts,
    order: ExpertOrder,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    pairs_per_token: int | None = None,
) -> None:
    """`grouped_matmul_four_bit` in torch, expert by expert in float64."""
    start = 0
    for expert, count in enumerate(order.counts.tolist()):
        rows = slice(start, start + count)
        pairs = order.pair_of_row[rows].long()
        source = x[rows] if pairs_per_token is None else x[pairs // pairs_per_token]
        product = source.double() @ weight.unpack(expert).double().t()
        out[rows] = (product if bias is None else product + bias[expert].double()).to(out.dtype)
        start += count


@triton.jit
def _dequantize_mxfp4(codes: tl.tensor, exponents: tl.tensor) -> tl.tensor:
    """Turn codes, uint8 [N, K] of one group a row, and exponents, uint8 [N], into bfloat16.

    A code's two bits of exponent and its bit of fraction, put where a bfloat16 has the lowest of
    its exponent and the highest of its fraction, are the value times 2 ** -126; also 0.5, whose
    exponent is 0 in both types. Both products are exact.
    """
    wide = codes.to(tl.uint16)
    bits = ((wide & 8) << 12) | ((wide & 7) << 6)
    scale_bits = (exponents.to(tl.uint16) << 7)[:, None]
    if IS_INTERPRETED:  # it has no arithmetic of bfloat16, and takes subnormal ones for 0
        value = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        scale = (scale_bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        result = (value * _TWO_TO_126 * scale).to(tl.bfloat16)
    else:
        value = bits.to(tl.bfloat16, bitcast=True)
        result = value * _TWO_TO_126 * scale_bits.to(tl.bfloat16, bitcast=True)
    return result


@triton.jit
def _load_x(x_rows: tl.tensor, k: tl.tensor, depth: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """Columns [k, k + 32) of a tile's rows, transposed."""
    columns = k + tl.arange(0, _HALF)[None, :]
    if EVEN:
        values = tl.load(x_rows + columns)
    else:
        values = tl.load(x_rows + columns, mask=columns < depth, other=0.0)
    return tl.trans(values)


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_four_bit_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    pair_of_row: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    num_tiles: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    codes_stride: tl.tensor,
    PAIRS_PER_TOKEN: tl.constexpr,
    IS_MXFP4: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    tile, tile_n = tile_of_program(tl.program_id(0), num_tiles, num_columns, 1, BLOCK_N, GROUP_M)
    expert = tl.load(tiles + tile)
    if expert >= 0:
        rows, end, source = rows_of_tile(
            tiles, pair_of_row, tile, num_tiles, PAIRS_PER_TOKEN, BLOCK_M
        )
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        column_index = tl.minimum(columns, num_columns - 1).to(tl.int64)
        first_row = expert.to(tl.int64) * num_columns
        x_rows = x + source[:, None] * depth
        code_rows = codes + (first_row + column_index)[:, None] * codes_stride
        # Two values a byte, 32 of them on one scale.
        scale_columns = scales + first_row * (codes_stride // (_HALF // 2)) + column_index
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for step in range(tl.cdiv(depth, _STEP)):
            both = tl.load(code_rows + step * _HALF + tl.arange(0, _HALF)[None, :])
            low_scales = tl.load(scale_columns + 2 * step * num_columns)
            high_scales = tl.load(scale_columns + (2 * step + 1) * num_columns)
            if IS_MXFP4:
                low = _dequantize_mxfp4(both & 15, low_scales)
                high = _dequantize_mxfp4(both >> 4, high_scales)
            else:
                low = dequantize_int4(both & 15, low_scales)
                high = dequantize_int4(both >> 4, high_scales)
            total = dot(low, _load_x(x_rows, step * _STEP, depth, EVEN), total)
            total = dot(high, _load_x(x_rows, step * _STEP + _HALF, depth, EVEN), total)
        store_rows(total, bias, out, expert, rows, end, columns, num_columns)


def compile_cases() -> list[CompileCase]:
    """As gpt-oss takes 4 experts of a token, and Qwen3-MoE 8."""
    return [
        *(_case(tile, is_mxfp4=True) for tile in TILES.values()),
        *(_case(tile, is_mxfp4=False) for tile in TILES.values()),
    ]


def _case(tile: MoeTile, *, is_mxfp4: bool) -> CompileCase:
    return CompileCase(
        f"moe product {tile.block_m}x{tile.block_n} {'mxfp4' if is_mxfp4 else 'int4'}",
        _grouped_four_bit_kernel,
        {
            "x": "*bf16",
            "codes": "*u8",
            "scales": "*u8" if is_mxfp4 else "*i32",
            "pair_of_row": "*i32",
            "tiles": "*i32",
            "out": "*bf16",
            "num_tiles": "i32",
            **dict.fromkeys(("num_columns", "depth", "codes_stride"), "i32:16"),
            **({"bias": "*fp32"} if is_mxfp4 else {}),
        },
        {
            **({} if is_mxfp4 else {"bias": None}),
            "PAIRS_PER_TOKEN": 4 if is_mxfp4 else 8,
            "IS_MXFP4": is_mxfp4,
            "EVEN": True,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "GROUP_M": tile.group_m,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
