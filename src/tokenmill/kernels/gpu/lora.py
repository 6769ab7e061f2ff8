"""Low-rank adapters (Hu et al., 2021), several in one batch: out += scale * (x @ A.T) @ B.T.

    shrink    x [M, K] by A [slots, R, K] to the rank, in segments of K
    expand    the segments' sum by B [slots, N, rank], added to out [M, N]

Row i uses the adapter in slot_of_row[i], none if that is -1. A tile of 16 rows is multiplied with
each adapter that one of its rows uses, and a row keeps the product of its own: rows need not be
sorted, nothing is read on the host, and a row has the same bits whatever its neighbours use.

A layer that merges several projections of one input (q, k and v) has the A of each below one
another, R = slices * rank, and the B of each likewise, N = the sum of the slices' widths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.dot import dot
from tokenmill.kernels.gpu.launch import CompileCase, cdiv, define_op, next_power_of_2

MOST_SLICES = 3

_SHORTEST_SEGMENT = 512
_MOST_SEGMENTS = 8

_BLOCK_M = 16
_BLOCK_K = 128
_BLOCK_N = 64
_MOST_BLOCK_R = 64
_NO_SLOT = tl.constexpr(1 << 30)


def segment_depth(depth: int) -> int:
    """Values of K that one program of `lora_shrink` sums; sums of segments are added in order."""
    return max(_SHORTEST_SEGMENT, cdiv(depth, _MOST_SEGMENTS * _BLOCK_K) * _BLOCK_K)


def shrink_segments(depth: int) -> int:
    """Segments of x's K columns: the leading size of what `lora_shrink` writes."""
    return cdiv(depth, segment_depth(depth))


def lora_shrink(
    x: torch.Tensor, a: torch.Tensor, slot_of_row: torch.Tensor, out: torch.Tensor
) -> None:
    """Put each segment's part of x [M, K] @ a[slot].T into out [segments, M, R].

    x and a [slots, R, K] are bfloat16 or float16 alike, slot_of_row int32 [M], out float32. Rows of
    x may lie apart. Rows without an adapter become 0.
    """
    (num_rows, depth), rank = x.shape, a.shape[1]
    assert a.dtype == x.dtype
    assert a.is_contiguous()
    assert a.shape[2] == depth
    assert x.stride(1) == 1
    assert slot_of_row.shape == (num_rows,)
    assert out.shape == (shrink_segments(depth), num_rows, rank)
    assert out.dtype == torch.float32
    assert out.is_contiguous()
    if num_rows == 0:
        return
    block_r = min(max(16, next_power_of_2(rank)), _MOST_BLOCK_R)
    _shrink_kernel[(cdiv(num_rows, _BLOCK_M), len(out), cdiv(rank, block_r))](
        x,
        a,
        slot_of_row,
        out,
        num_rows,
        rank,
        depth,
        x.stride(0),
        SEGMENT=segment_depth(depth),
        BLOCK_M=_BLOCK_M,
        BLOCK_R=block_r,
        BLOCK_K=_BLOCK_K,
        num_warps=4,
        num_stages=3,
    )


def lora_expand(
    shrunk: torch.Tensor,
    b: torch.Tensor,
    slot_of_row: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    *,
    slices: Sequence[int] | None = None,
) -> None:
    """Add scale[slot] * shrunk @ b[slot].T to out [M, N], in place.

    shrunk is what `lora_shrink` wrote; b [slots, N, rank] is bfloat16 or float16, scale float32
    [slots], out bfloat16, float16 or float32, whose rows may lie apart. `slices` are the widths of
    the merged projections, at most three, by default one of N columns. Rows without an adapter are
    not touched.
    """
    (num_segments, num_rows, total_rank), (_, num_columns, rank) = shrunk.shape, b.shape
    slices = slices or (num_columns,)
    assert len(slices) <= MOST_SLICES
    assert sum(slices) == num_columns
    assert total_rank == len(slices) * rank
    assert out.shape == (num_rows, num_columns)
    assert out.stride(1) == 1
    assert all(t.is_contiguous() for t in (shrunk, b, scale, slot_of_row))
    assert shrunk.dtype == scale.dtype == torch.float32
    if num_rows == 0 or num_columns == 0:
        return
    widths = (*slices, *(0,) * (MOST_SLICES - len(slices)))
    num_tiles = sum(cdiv(width, _BLOCK_N) for width in widths)
    _expand_kernel[(num_tiles, cdiv(num_rows, _BLOCK_M))](
        shrunk,
        b,
        slot_of_row,
        scale,
        out,
        num_rows,
        num_columns,
        *widths,
        out.stride(0),
        NUM_SEGMENTS=num_segments,
        TOTAL_RANK=total_rank,
        RANK=rank,
        BLOCK_R=max(16, next_power_of_2(rank)),
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        num_warps=4,
        num_stages=2,
    )


def lora_shrink_reference(
    x: torch.Tensor, a: torch.Tensor, slot_of_row: torch.Tensor, out: torch.Tensor
) -> None:
    """`lora_shrink` in torch, row by row."""
    out.zero_()
    size = segment_depth(x.shape[1])
    for row, slot in enumerate(slot_of_row.tolist()):
        if slot >= 0:
            for segment in range(len(out)):
                part = slice(segment * size, (segment + 1) * size)
                out[segment, row] = a[slot, :, part].double() @ x[row, part].double()


def lora_expand_reference(
    shrunk: torch.Tensor,
    b: torch.Tensor,
    slot_of_row: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    *,
    slices: Sequence[int] | None = None,
) -> None:
    """`lora_expand` in torch, row by row."""
    rank = b.shape[2]
    for row, slot in enumerate(slot_of_row.tolist()):
        if slot < 0:
            continue
        low = shrunk[:, row].double().sum(0)
        start = 0
        for i, width in enumerate(slices or (b.shape[1],)):
            columns = slice(start, start + width)
            change = b[slot, columns].double() @ low[i * rank : (i + 1) * rank]
            out[row, columns] = (out[row, columns].double() + scale[slot].double() * change).to(
                out.dtype
            )
            start += width


@triton.jit
def _next_slot(slots: tl.tensor, slot: tl.tensor) -> tl.tensor:
    """The smallest of a tile's slots that is greater than `slot`."""
    return tl.min(tl.where(slots > slot, slots, _NO_SLOT), axis=0)


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x: tl.tensor,
    a: tl.tensor,
    slot_of_row: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    rank: tl.tensor,
    depth: tl.tensor,
    x_stride: tl.tensor,
    SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    ranks = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = rows < num_rows
    is_rank = ranks < rank
    steps = tl.arange(0, BLOCK_K)[None, :]
    begin = tl.program_id(1) * SEGMENT
    slots = tl.load(slot_of_row + rows, mask=is_row, other=-1)
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    slot = _next_slot(slots, -1)
    while slot < _NO_SLOT:
        a_rows = a + (slot.to(tl.int64) * rank + ranks)[:, None] * depth
        product = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for k in range(begin, begin + SEGMENT, BLOCK_K):
            inside = k + steps < depth
            x_tile = tl.load(x_rows + k + steps, mask=is_row[:, None] & inside, other=0.0)
            a_tile = tl.load(a_rows + k + steps, mask=is_rank[:, None] & inside, other=0.0)
            product = dot(x_tile, tl.trans(a_tile), product)
        total = tl.where((slots == slot)[:, None], product, total)
        slot = _next_slot(slots, slot)
    place = (tl.program_id(1).to(tl.int64) * num_rows + rows)[:, None] * rank + ranks[None, :]
    tl.store(out + place, total, mask=is_row[:, None] & is_rank[None, :])


@triton.jit
def _slice_of_tile(
    tile: tl.tensor, width_0: tl.tensor, width_1: tl.tensor, width_2: tl.tensor, BLOCK: tl.constexpr
) -> tl.tuple:
    """(slice, its first column, the tile's first column within it, the slice's width)."""
    tiles_0 = tl.cdiv(width_0, BLOCK)
    tiles_1 = tl.cdiv(width_1, BLOCK)
    in_0 = tile < tiles_0
    in_1 = tile < tiles_0 + tiles_1
    index = tl.where(in_0, 0, tl.where(in_1, 1, 2))
    first = tl.where(in_0, 0, tl.where(in_1, width_0, width_0 + width_1))
    before = tl.where(in_0, 0, tl.where(in_1, tiles_0, tiles_0 + tiles_1))
    width = tl.where(in_0, width_0, tl.where(in_1, width_1, width_2))
    return index, first, (tile - before) * BLOCK, width


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    shrunk: tl.tensor,
    b: tl.tensor,
    slot_of_row: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    width_0: tl.tensor,
    width_1: tl.tensor,
    width_2: tl.tensor,
    out_stride: tl.tensor,
    NUM_SEGMENTS: tl.constexpr,
    TOTAL_RANK: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    part, first, start, width = _slice_of_tile(tl.program_id(0), width_0, width_1, width_2, BLOCK_N)
    within = start + tl.arange(0, BLOCK_N)
    columns = first + within
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, BLOCK_R)
    is_row = rows < num_rows
    is_column = within < width
    is_rank = ranks < RANK
    slots = tl.load(slot_of_row + rows, mask=is_row, other=-1)
    slot = _next_slot(slots, -1)
    if slot < _NO_SLOT:
        low_mask = is_row[:, None] & is_rank[None, :]
        place = rows.to(tl.int64)[:, None] * TOTAL_RANK + (part * RANK + ranks)[None, :]
        low = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for segment in tl.static_range(NUM_SEGMENTS):
            behind = segment * num_rows.to(tl.int64) * TOTAL_RANK
            low += tl.load(shrunk + behind + place, mask=low_mask, other=0.0)
        rounded = low.to(b.dtype.element_ty)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        while slot < _NO_SLOT:
            b_rows = b + (slot.to(tl.int64) * num_columns + columns)[:, None] * RANK
            b_tile = tl.load(
                b_rows + ranks[None, :], mask=is_column[:, None] & is_rank[None, :], other=0.0
            )
            product = dot(rounded, tl.trans(b_tile), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
            total = tl.where((slots == slot)[:, None], product * tl.load(scale + slot), total)
            slot = _next_slot(slots, slot)
        mask = (slots >= 0)[:, None] & is_column[None, :]
        target = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
        tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def _expand_op(
    shrunk: torch.Tensor,
    b: torch.Tensor,
    slot_of_row: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    slices: Sequence[int],
) -> None:
    lora_expand(shrunk, b, slot_of_row, scale, out, slices=slices)


def _expand_reference_op(
    shrunk: torch.Tensor,
    b: torch.Tensor,
    slot_of_row: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    slices: Sequence[int],
) -> None:
    lora_expand_reference(shrunk, b, slot_of_row, scale, out, slices=slices)


define_op(
    "lora_shrink(Tensor x, Tensor a, Tensor slot_of_row, Tensor(a!) out) -> ()",
    cuda=lora_shrink,
    cpu=lora_shrink_reference,
)
define_op(
    "lora_expand(Tensor shrunk, Tensor b, Tensor slot_of_row, Tensor scale, Tensor(a!) out,"
    " int[] slices) -> ()",
    cuda=_expand_op,
    cpu=_expand_reference_op,
)


def compile_cases() -> list[CompileCase]:
    """A rank of 16 beside a merged q, k and v, and the largest rank."""
    return [
        *(_shrink_case(total_rank) for total_rank in (16, 48, 384)),
        *(_expand_case(rank, num_slices) for rank, num_slices in ((16, 1), (16, 3), (128, 3))),
    ]


def _shrink_case(rank: int) -> CompileCase:
    block_r = min(max(16, next_power_of_2(rank)), _MOST_BLOCK_R)
    return CompileCase(
        f"lora_shrink rank {rank}",
        _shrink_kernel,
        {
            "x": "*bf16",
            "a": "*bf16",
            "slot_of_row": "*i32",
            "out": "*fp32",
            "num_rows": "i32",
            "rank": "i32:16",
            "depth": "i32:16",
            "x_stride": "i32:16",
        },
        {
            "SEGMENT": segment_depth(4096),
            "BLOCK_M": _BLOCK_M,
            "BLOCK_R": block_r,
            "BLOCK_K": _BLOCK_K,
        },
        num_warps=4,
        num_stages=3,
    )


def _expand_case(rank: int, num_slices: int) -> CompileCase:
    widths = ("num_columns", "width_0", "width_1", "width_2", "out_stride")
    return CompileCase(
        f"lora_expand rank {rank}, {num_slices} slices",
        _expand_kernel,
        {
            "shrunk": "*fp32",
            "b": "*bf16",
            "slot_of_row": "*i32",
            "scale": "*fp32",
            "out": "*bf16",
            "num_rows": "i32",
            **dict.fromkeys(widths, "i32:16"),
        },
        {
            "NUM_SEGMENTS": shrink_segments(4096),
            "TOTAL_RANK": num_slices * rank,
            "RANK": rank,
            "BLOCK_R": next_power_of_2(rank),
            "BLOCK_M": _BLOCK_M,
            "BLOCK_N": _BLOCK_N,
        },
        num_warps=4,
        num_stages=2,
    )
