"""Products of the parts of rows, a matrix for each part: out[n, p] = x[n, p] @ weight[p].T.

A part's matrix is no larger than a head's, and there are as many as heads, so they are one launch.
The sum along K is one chain of matrix instructions with the weight as the first operand: a row has
the same bits for any number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.dot import dot
from tokenmill.kernels.gpu.launch import CompileCase, cdiv, define_op
from tokenmill.kernels.gpu.moe import MOE_LARGE, MOE_TILES
from tokenmill.kernels.gpu.moe_tiles import MoeTile


def choose_parts_tile(num_rows: int) -> MoeTile:
    """The tile for so many rows."""
    return next((tile for most, tile in MOE_TILES if num_rows <= most), MOE_LARGE)


def matmul_parts(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Put x [N, parts, K], each part times its matrix of weight [parts, C, K], into out [N, parts,
    C].

    x and weight are bfloat16, float16 or float32 alike, out any of these. The weight is contiguous;
    rows and parts of x and out may lie apart.
    """
    num_rows, num_parts, depth = x.shape
    num_columns = weight.shape[1]
    assert x.dtype == weight.dtype
    assert weight.shape == (num_parts, num_columns, depth)
    assert weight.is_contiguous()
    assert out.shape == (num_rows, num_parts, num_columns)
    assert x.stride(2) == out.stride(2) == 1
    if x.numel() == 0 or out.numel() == 0:
        return
    tile = choose_parts_tile(num_rows)
    tiles = cdiv(num_rows, tile.block_m) * cdiv(num_columns, tile.block_n)
    _matmul_parts_kernel[(tiles, num_parts)](
        x,
        weight,
        out,
        num_rows,
        num_columns,
        depth,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        EVEN=depth % tile.block_k == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        # Tiles of float32 take twice the shared memory.
        num_stages=2 if x.dtype == torch.float32 else tile.num_stages,
    )


def matmul_parts_reference(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """`matmul_parts` in float64."""
    out.copy_(torch.einsum("npk,pck->npc", x.double(), weight.double()))


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_parts_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    x_stride: tl.tensor,
    x_part_stride: tl.tensor,
    out_stride: tl.tensor,
    out_part_stride: tl.tensor,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Grid (tiles, parts); programs of neighbouring columns read the same rows."""
    tiles_n = tl.cdiv(num_columns, BLOCK_N)
    part = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # A tile that reaches over the edge reads rows that exist, and stores nothing of them.
    row_index = tl.minimum(rows, num_rows - 1).to(tl.int64)
    column_index = tl.minimum(columns, num_columns - 1)
    steps = tl.arange(0, BLOCK_K)[None, :]
    x_rows = x + part * x_part_stride + row_index[:, None] * x_stride + steps
    matrix = weight + part * num_columns * depth
    weight_rows = matrix + column_index[:, None] * depth + steps
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, depth, BLOCK_K):
        if EVEN:
            x_tile = tl.load(x_rows + k)
            weight_tile = tl.load(weight_rows + k)
        else:
            inside = steps < depth - k
            x_tile = tl.load(x_rows + k, mask=inside, other=0.0)
            weight_tile = tl.load(weight_rows + k, mask=inside, other=0.0)
        total = dot(weight_tile, tl.trans(x_tile), total)
    places = rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    values = tl.trans(total).to(out.dtype.element_ty)
    tl.store(out + part * out_part_stride + places, values, mask=mask)


define_op(
    "matmul_parts(Tensor x, Tensor weight, Tensor(a!) out) -> ()",
    cuda=matmul_parts,
    cpu=matmul_parts_reference,
)


def compile_cases() -> list[CompileCase]:
    """Every tile, for parts that are multiples of its steps, and for others."""
    tiles = [*(tile for _, tile in MOE_TILES), MOE_LARGE]
    return [_case(tile, is_even) for tile in tiles for is_even in (True, False)]


def _case(tile: MoeTile, is_even: bool) -> CompileCase:
    sizes = ("num_columns", "depth", "x_stride", "x_part_stride", "out_stride", "out_part_stride")
    return CompileCase(
        f"matmul_parts {tile.block_m}x{tile.block_n}{'' if is_even else ' odd'}",
        _matmul_parts_kernel,
        {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "num_rows": "i32"}
        | dict.fromkeys(sizes, "i32:16"),
        {
            "EVEN": is_even,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
