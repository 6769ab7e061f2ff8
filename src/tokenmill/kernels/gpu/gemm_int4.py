"""Products of bfloat16 rows and four-bit weights (`int4.py`): x [M, K] @ weight [N, K].T + bias.

Weights become bfloat16 in registers, on their way to the matrix unit, whose first operand they are:
so a quarter of the bytes of 16-bit weights is read, and no weight is written. Sums are float32, in
one order for any number of rows (`gemm_config.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.dot import IS_INTERPRETED, dot
from tokenmill.kernels.gpu.gemm_config import (
    ANY_ROWS,
    HALF_WAVE,
    TWO_WAVES,
    Choice,
    SplitWorkspace,
    Table,
    choose_segments,
    pick_tile,
    segment_depth,
    tiles_of,
)
from tokenmill.kernels.gpu.gemm_tiles import leave_segment, sum_segments, tile_of_program
from tokenmill.kernels.gpu.int4 import DEPTH_MULTIPLE, PackedInt4, half_unit
from tokenmill.kernels.gpu.launch import CompileCase, cdiv, define_op
from tokenmill.kernels.gpu.overlap import let_next_start, overlaps, wait_for_previous

_STEP = tl.constexpr(DEPTH_MULTIPLE)


@dataclass(frozen=True, slots=True)
class Int4Tile:
    """The part of a product that one program computes; it steps by 128 along K."""

    block_m: int
    """Rows of x."""
    block_n: int
    """Rows of the weight, a multiple of 64."""
    num_warps: int
    num_stages: int
    segments_in_grid: bool
    group_m: int = 8


INT4_TILES: Table[Int4Tile] = (
    (16, (Choice(Int4Tile(16, 64, 4, 6, True), 0),)),
    (32, (Choice(Int4Tile(32, 64, 4, 5, True), 0),)),
    (
        64,
        (Choice(Int4Tile(64, 128, 8, 4, True), TWO_WAVES), Choice(Int4Tile(64, 64, 4, 5, True), 0)),
    ),
    (
        128,
        (
            Choice(Int4Tile(128, 128, 8, 3, True), TWO_WAVES),
            Choice(Int4Tile(128, 64, 4, 4, True), 0),
        ),
    ),
    (
        ANY_ROWS,
        (
            Choice(Int4Tile(128, 128, 8, 3, False), HALF_WAVE),
            Choice(Int4Tile(128, 128, 8, 3, True), 0),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Int4Plan:
    """What a kernel is compiled for."""

    block_m: int
    block_n: int
    group_m: int
    group_size: int
    half: int
    num_segments: int
    segments_in_grid: bool
    is_even: bool
    """K is a multiple of 128."""


def matmul_int4(
    x: torch.Tensor,
    weight: PackedInt4,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    workspace: SplitWorkspace,
    *,
    tile: Int4Tile | None = None,
    num_segments: int | None = None,
) -> None:
    """Put x @ weight.T + bias into out [M, N].

    x is bfloat16 [M, K]; bias [N] and out are bfloat16, float16 or float32. Rows of x and out may
    lie apart. A row of out has the same bits whatever M is.
    """
    (num_rows, depth), num_columns = x.shape, weight.out_features
    assert x.dtype == torch.bfloat16
    assert depth == weight.in_features
    assert x.stride(1) == 1
    assert out.shape == (num_rows, num_columns)
    assert out.stride(1) == 1
    assert bias is None or bias.shape == (num_columns,)
    if num_rows == 0 or num_columns == 0:
        return
    per_segment = segment_depth(depth, num_segments or choose_segments(num_columns, depth))
    num_segments = cdiv(depth, per_segment)
    tile = tile or pick_tile(INT4_TILES, num_rows, num_columns, num_segments)
    plan = _plan(tile, weight.group_size, num_segments, is_even=depth % DEPTH_MULTIPLE == 0)
    num_tiles = cdiv(num_rows, tile.block_m) * cdiv(num_columns, tile.block_n)
    if plan.segments_in_grid:
        assert workspace.holds(num_tiles, num_segments, tile.block_m * tile.block_n)
    _matmul_int4_kernel[(num_tiles * (num_segments if plan.segments_in_grid else 1),)](
        x,
        weight.codes,
        weight.scales,
        bias,
        out,
        workspace.partial,
        workspace.arrivals,
        num_rows,
        num_columns,
        depth,
        weight.codes.shape[1],
        per_segment,
        x.stride(0),
        out.stride(0),
        P=plan,
        OVERLAPS=overlaps(x.device),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=overlaps(x.device),
    )


def matmul_int4_reference(
    x: torch.Tensor, weight: PackedInt4, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """What `matmul_int4` approximates, in float64."""
    ids = torch.arange(weight.out_features, device=x.device)
    product = x.double() @ weight.unpack_rows(ids).double().t()
    out.copy_(product if bias is None else product + bias.double())


def _plan(tile: Int4Tile, group_size: int, num_segments: int, *, is_even: bool) -> Int4Plan:
    return Int4Plan(
        block_m=tile.block_m,
        block_n=tile.block_n,
        group_m=tile.group_m,
        group_size=group_size,
        half=half_unit(group_size),
        num_segments=num_segments,
        segments_in_grid=tile.segments_in_grid and num_segments > 1,
        is_even=is_even,
    )


@triton.jit
def dequantize_int4(codes: tl.tensor, scales: tl.tensor) -> tl.tensor:
    """Turn codes, uint8 [N, K] of one group a row, and scales, int32 [N], into bfloat16.

    128 + code is the bfloat16 with the code in its lowest bits: no conversion of integers.
    """
    scale = (scales & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)[:, None]
    minimum = (scales >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)[:, None]
    if IS_INTERPRETED:  # it has no arithmetic of bfloat16
        value = codes.to(tl.float32) * scale.to(tl.float32) + minimum.to(tl.float32)
        result = value.to(tl.bfloat16)
    else:
        value = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 128.0
        shape: tl.constexpr = codes.shape
        result = tl.fma(value, tl.broadcast_to(scale, shape), tl.broadcast_to(minimum, shape))
    return result


@triton.jit
def _load_x(x_rows: tl.tensor, k: tl.tensor, depth: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """Columns [k, k + P.half) of a tile's rows."""
    columns = k + tl.arange(0, P.half)[None, :]
    if P.is_even:
        values = tl.load(x_rows + columns)
    else:
        values = tl.load(x_rows + columns, mask=columns < depth, other=0.0)
    return values


@triton.jit
def _add_step(operands: tl.tuple, step: tl.tensor, total: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """Add a step of 128 values of K to a tile's sum [block_n, block_m].

    Places are counted in steps, so that the compiler sees how far all addresses are aligned.
    """
    x_rows, code_rows, scale_columns, num_columns, depth = operands
    HALF: tl.constexpr = P.half
    UNITS: tl.constexpr = _STEP // (2 * HALF)
    GROUPS: tl.constexpr = _STEP // P.group_size
    for unit in tl.static_range(UNITS):
        byte = step * (_STEP // 2) + unit * HALF
        codes = tl.load(code_rows + byte + tl.arange(0, HALF)[None, :])
        # Where a group is as long as the unit, both halves have one scale.
        group = step * GROUPS + (unit * 2 * HALF) // P.group_size
        low_scales = tl.load(scale_columns + group * num_columns)
        high_scales = low_scales
        if P.group_size == HALF:
            high_scales = tl.load(scale_columns + (group + 1) * num_columns)
        first = step * _STEP + unit * 2 * HALF
        low = dequantize_int4(codes & 15, low_scales)
        total = dot(low, tl.trans(_load_x(x_rows, first, depth, P)), total)
        high = dequantize_int4(codes >> 4, high_scales)
        total = dot(high, tl.trans(_load_x(x_rows, first + HALF, depth, P)), total)
    return total


@triton.jit
def _empty_sum(P: tl.constexpr) -> tl.tensor:
    M: tl.constexpr = P.block_m
    N: tl.constexpr = P.block_n
    return tl.zeros((N, M), tl.float32)


@triton.jit
def _segment_sum(
    operands: tl.tuple, begin: tl.tensor, end: tl.tensor, P: tl.constexpr
) -> tl.tensor:
    """The tile's sum over [begin, end) of K."""
    total = _empty_sum(P)
    for step in range(begin // _STEP, tl.cdiv(end, _STEP)):
        total = _add_step(operands, step, total, P)
    return total


@triton.jit
def _all_segments(
    operands: tl.tuple, depth: tl.tensor, segment_depth: tl.tensor, P: tl.constexpr
) -> tl.tensor:
    """The tile's sum over K, segment by segment, in one loop."""
    total = _empty_sum(P)
    segment = _empty_sum(P)
    end = segment_depth // _STEP
    for step in range(tl.cdiv(depth, _STEP)):
        # Here, not behind the product: there the compiler would read it before it is complete.
        if step == end:
            total += segment
            segment = _empty_sum(P)
            end += segment_depth // _STEP
        segment = _add_step(operands, step, segment, P)
    return total + segment


@triton.jit
def _store_tile(total: tl.tensor, bias: tl.tensor, out: tl.tensor, target: tl.tuple) -> None:
    rows, columns, num_rows, num_columns, out_stride = target
    result = tl.trans(total)
    is_column = columns < num_columns
    if bias is not None:
        result += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    inside = (rows < num_rows)[:, None] & is_column[None, :]
    offsets = rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_int4_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    arrivals: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    codes_stride: tl.tensor,
    segment_depth: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    P: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    let_next_start(OVERLAPS)
    wait_for_previous(OVERLAPS)
    M: tl.constexpr = P.block_m
    N: tl.constexpr = P.block_n
    NUM_SEGMENTS: tl.constexpr = P.num_segments
    program = tl.program_id(0)
    tile = program // NUM_SEGMENTS if P.segments_in_grid else program
    tile_m, tile_n = tile_of_program(tile, num_rows, num_columns, M, N, P.group_m)
    rows = tile_m * M + tl.arange(0, M)
    columns = tile_n * N + tl.arange(0, N)
    # A tile that reaches over the edge reads rows that exist, and stores nothing of them.
    row_index = tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None]
    column_index = tl.minimum(columns, num_columns - 1)
    operands = (
        x + row_index * x_stride,
        codes + column_index.to(tl.int64)[:, None] * codes_stride,
        scales + column_index,
        num_columns,
        depth,
    )
    target = (rows, columns, num_rows, num_columns, out_stride)
    if P.segments_in_grid:
        segment = program % NUM_SEGMENTS
        begin = segment * segment_depth
        total = _segment_sum(operands, begin, tl.minimum(begin + segment_depth, depth), P)
        if leave_segment(total, partial, arrivals, tile, segment, NUM_SEGMENTS):
            merged = sum_segments(partial, arrivals, tile, NUM_SEGMENTS, N, M)
            _store_tile(merged, bias, out, target)
    elif NUM_SEGMENTS == 1:
        total = _segment_sum(operands, 0, depth, P)
        _store_tile(total, bias, out, target)
    else:
        total = _all_segments(operands, depth, segment_depth, P)
        _store_tile(total, bias, out, target)


def _matmul_int4_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    partial: torch.Tensor,
    arrivals: torch.Tensor,
    group_size: int,
) -> None:
    weight = PackedInt4(codes, scales, group_size, x.shape[1])
    matmul_int4(x, weight, bias, out, SplitWorkspace(partial, arrivals))


def _matmul_int4_reference_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    partial: torch.Tensor,
    arrivals: torch.Tensor,
    group_size: int,
) -> None:
    matmul_int4_reference(x, PackedInt4(codes, scales, group_size, x.shape[1]), bias, out)


define_op(
    "matmul_int4(Tensor x, Tensor codes, Tensor scales, Tensor? bias, Tensor(a!) out,"
    " Tensor(b!) partial, Tensor(c!) arrivals, int group_size) -> ()",
    cuda=_matmul_int4_op,
    cpu=_matmul_int4_reference_op,
)


def compile_cases() -> list[CompileCase]:
    """Every tile, for a narrow weight in four segments and a wide one in one."""
    tiles = tiles_of(INT4_TILES)
    cases = [(tile, segments, 128) for tile in tiles for segments in (1, 4)]
    cases += [(tiles[0], 4, 32), (tiles[0], 4, 64), (tiles[-2], 1, 32)]
    return [_compile_case(*case) for case in cases]


def _compile_case(tile: Int4Tile, num_segments: int, group_size: int) -> CompileCase:
    sizes = ("num_columns", "depth", "codes_stride", "segment_depth", "x_stride", "out_stride")
    return CompileCase(
        f"matmul_int4 {tile.block_m}x{tile.block_n} groups of {group_size}, {num_segments} segments"
        f"{'' if tile.segments_in_grid else ' in registers'}",
        _matmul_int4_kernel,
        {
            "x": "*bf16",
            "codes": "*u8",
            "scales": "*i32",
            "out": "*bf16",
            "partial": "*fp32",
            "arrivals": "*i32",
            "num_rows": "i32",
            **dict.fromkeys(sizes, "i32:16"),
        },
        {
            "bias": None,
            "P": _plan(tile, group_size, num_segments, is_even=True),
            "OVERLAPS": True,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
