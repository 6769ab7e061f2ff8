"""What the grouped products of experts share: tiles, and the rows of one."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class MoeTile:
    """The part of a grouped product that one program computes."""

    block_m: int
    """Rows of one expert."""
    block_n: int
    """Rows of the weight, a multiple of 64: it is the first operand of the matrix instruction."""
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8


@triton.jit
def rows_of_tile(
    tiles: tl.tensor,
    pair_of_row: tl.tensor,
    tile: tl.tensor,
    num_tiles: tl.tensor,
    PAIRS_PER_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tl.tuple:
    """(rows of a tile, where its expert's end, rows of x that they are computed from, int64).

    A tile that reaches over the end reads a row that exists, and must store nothing of it.
    """
    end = tl.load(tiles + 2 * num_tiles + tile)
    rows = tl.load(tiles + num_tiles + tile) + tl.arange(0, BLOCK_M)
    source = tl.minimum(rows, end - 1)
    if PAIRS_PER_TOKEN > 0:
        source = tl.load(pair_of_row + source) // PAIRS_PER_TOKEN
    return rows, end, source.to(tl.int64)


@triton.jit
def store_rows(
    total: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    expert: tl.tensor,
    rows: tl.tensor,
    end: tl.tensor,
    columns: tl.tensor,
    num_columns: tl.tensor,
) -> None:
    """Store the sum [block_n, block_m] of a tile, plus its expert's bias if there is one."""
    inside = columns < num_columns
    if bias is not None:
        biases = bias + expert.to(tl.int64) * num_columns + columns
        total += tl.load(biases, mask=inside, other=0.0).to(tl.float32)[:, None]
    offsets = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    mask = (rows < end)[:, None] & inside[None, :]
    tl.store(out + offsets, tl.trans(total).to(out.dtype.element_ty), mask=mask)
