"""The kernel of the products with plain 16-bit, 32-bit and float8 weights, in tiles.

How a product is cut is in `gemm_config.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.kernels.gpu.dot import dot
from tokenmill.kernels.gpu.gemm_config import (
    SplitWorkspace,
    Table,
    TileConfig,
    choose_segments,
    pick_tile,
    plan_product,
    segment_depth,
)
from tokenmill.kernels.gpu.launch import CompileCase, cdiv
from tokenmill.kernels.gpu.overlap import (
    fetch_to_l2,
    let_next_start,
    overlaps,
    wait_for_previous,
)


def launch_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    workspace: SplitWorkspace,
    table: Table[TileConfig],
    *,
    tile: TileConfig | None = None,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    num_segments: int | None = None,
) -> None:
    """Put (x [M, K] @ weight [N, K].T) * x_scale [M, 1] * weight_scale [N] + bias [N] into out.

    x and weight have one type; scales, float32, are both there or both absent. The weight is
    contiguous; rows of x and out may lie apart. The tile is chosen from the table if none is given.
    """
    _check(x, weight, out, bias, x_scale, weight_scale)
    (num_rows, depth), num_columns = x.shape, weight.shape[0]
    if num_rows == 0 or num_columns == 0:
        return
    per_segment = segment_depth(depth, num_segments or choose_segments(num_columns, depth))
    num_segments = cdiv(depth, per_segment)
    tile = tile or pick_tile(table, num_rows, num_columns, num_segments)
    # No step crosses into another segment.
    assert num_segments == 1 or per_segment % tile.block_k == 0
    plan = plan_product(
        tile,
        num_segments,
        depth,
        aligned=_fit_descriptors(x, weight),
        overlaps=overlaps(x.device),
    )
    num_tiles = cdiv(num_rows, tile.block_m) * cdiv(num_columns, tile.block_n)
    if plan.segments_in_grid:
        assert workspace.holds(num_tiles, num_segments, tile.block_m * tile.block_n)
    product_kernel[(num_tiles * (plan.num_segments if plan.segments_in_grid else 1),)](
        _descriptor(x, tile.block_m, tile.block_k) if plan.by_descriptor else x,
        _descriptor(weight, tile.block_n, tile.block_k) if plan.by_descriptor else weight,
        weight if plan.early_bytes else None,
        x_scale,
        weight_scale,
        bias,
        out,
        workspace.partial,
        workspace.arrivals,
        num_rows,
        num_columns,
        depth,
        per_segment,
        x.stride(0),
        out.stride(0),
        P=plan,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=plan.overlaps,
    )


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
) -> None:
    num_rows, num_columns = x.shape[0], weight.shape[0]
    assert x.dtype == weight.dtype
    assert x.shape[1] == weight.shape[1]
    assert weight.is_contiguous()
    assert x.stride(1) == 1
    assert out.shape == (num_rows, num_columns)
    assert out.stride(1) == 1
    assert bias is None or bias.shape == (num_columns,)
    assert x_scale is None or (x_scale.numel() == num_rows and x_scale.is_contiguous())
    assert weight_scale is None or weight_scale.shape == (num_columns,)


def _fit_descriptors(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine can fetch tiles of all: rows begin at multiples of 16 bytes."""
    return all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in tensors)


def _descriptor(matrix: torch.Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """What a kernel is given to have the copy engine fetch tiles of so many rows and columns."""
    return TensorDescriptor.from_tensor(matrix, [num_rows, num_columns])


@triton.jit
def tile_of_program(
    program: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> tl.tuple:
    """(row tile, column tile): GROUP_M row tiles walk the weight's tiles together."""
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n = tl.cdiv(num_columns, BLOCK_N)
    group = program // (GROUP_M * tiles_n)
    group_size = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    return group * GROUP_M + within % group_size, within // group_size


@triton.jit
def _fetch_early(
    weight: tl.tensor,
    columns: tl.tensor,
    num_columns: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    depth: tl.tensor,
    P: tl.constexpr,
) -> None:
    """Have the first bytes of a program's part of the weight, rows x [begin, end), come to L2."""
    VALUE_BYTES: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    PIECE: tl.constexpr = P.early_bytes // (P.block_n * P.early_pieces * VALUE_BYTES)
    starts = begin + tl.arange(0, P.early_pieces)[None, :] * PIECE
    num_values = tl.minimum(end - starts, PIECE)
    num_values = tl.where((columns < num_columns)[:, None], num_values, 0)
    fetch_to_l2(weight + columns.to(tl.int64)[:, None] * depth + starts, num_values * VALUE_BYTES)


@triton.jit
def _empty_sum(P: tl.constexpr) -> tl.tensor:
    A: tl.constexpr = P.block_n if P.weight_first else P.block_m
    B: tl.constexpr = P.block_m if P.weight_first else P.block_n
    return tl.zeros((A, B), tl.float32)


@triton.jit
def _add_step(operands: tl.tuple, k: tl.tensor, total: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """Add block_k values of K, from k on, to a tile's sum."""
    x, weight, row, column, x_offsets, weight_offsets, depth = operands
    if P.by_descriptor:  # what lies outside the tensors is zero
        x_tile = x.load([row, k])
        weight_tile = weight.load([column, k])
    elif P.is_even:
        x_tile = tl.load(x + k + x_offsets)
        weight_tile = tl.load(weight + k + weight_offsets)
    else:
        inside = tl.arange(0, P.block_k)[None, :] < depth - k
        x_tile = tl.load(x + k + x_offsets, mask=inside, other=0.0)
        weight_tile = tl.load(weight + k + weight_offsets, mask=inside, other=0.0)
    if P.weight_first:
        total = dot(weight_tile, tl.trans(x_tile), total, P.most_imprecise)
    else:
        total = dot(x_tile, tl.trans(weight_tile), total, P.most_imprecise)
    return total


@triton.jit
def _segment_sum(
    operands: tl.tuple, begin: tl.tensor, end: tl.tensor, P: tl.constexpr
) -> tl.tensor:
    """The tile's sum over [begin, end) of K; the weight's columns go down if P.weight_first."""
    total = _empty_sum(P)
    for k in range(begin, end, P.block_k):
        total = _add_step(operands, k, total, P)
    return total


@triton.jit
def _all_segments(
    operands: tl.tuple, depth: tl.tensor, segment_depth: tl.tensor, P: tl.constexpr
) -> tl.tensor:
    """The tile's sum over K, segment by segment.

    One loop, so that the next segment's tiles are on their way while one ends.
    """
    total = _empty_sum(P)
    segment = _empty_sum(P)
    end = segment_depth
    for k in range(0, depth, P.block_k):
        segment = _add_step(operands, k, segment, P)
        if k + P.block_k >= end:
            total += segment
            segment = _empty_sum(P)
            end += segment_depth
    # The last one, if it is shorter than the others.
    return total + segment


@triton.jit
def leave_segment(
    total: tl.tensor,
    partial: tl.tensor,
    arrivals: tl.tensor,
    tile: tl.tensor,
    segment: tl.tensor,
    NUM_SEGMENTS: tl.constexpr,
) -> tl.tensor:
    """Write a segment's sum [A, B] of a tile; whether it is the last one that was missing."""
    A: tl.constexpr = total.shape[0]
    B: tl.constexpr = total.shape[1]
    within = tl.arange(0, A)[:, None] * B + tl.arange(0, B)[None, :]
    place = partial + (tile.to(tl.int64) * NUM_SEGMENTS + segment) * (A * B)
    tl.store(place + within, total)
    # All threads have written before one of them says so.
    tl.debug_barrier()
    return tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == NUM_SEGMENTS - 1


@triton.jit
def sum_segments(
    partial: tl.tensor,
    arrivals: tl.tensor,
    tile: tl.tensor,
    NUM_SEGMENTS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
) -> tl.tensor:
    """The sum of all segments of a tile [A, B], in order; resets the count of arrivals."""
    within = tl.arange(0, A)[:, None] * B + tl.arange(0, B)[None, :]
    place = partial + tile.to(tl.int64) * (NUM_SEGMENTS * A * B)
    total = tl.zeros((A, B), tl.float32)
    for segment in tl.static_range(NUM_SEGMENTS):
        # Past L1, which does not see what other multiprocessors write.
        total += tl.load(place + segment * (A * B) + within, cache_modifier=".cg")
    tl.store(arrivals + tile, 0)
    return total


@triton.jit
def _store_tile(
    total: tl.tensor,
    x_scale: tl.tensor,
    weight_scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    target: tl.tuple,
    P: tl.constexpr,
) -> None:
    rows, columns, num_rows, num_columns, out_stride = target
    result = tl.trans(total) if P.weight_first else total
    is_column = columns < num_columns
    if x_scale is not None:
        result *= tl.load(x_scale + rows, mask=rows < num_rows, other=0.0)[:, None]
        result *= tl.load(weight_scale + columns, mask=is_column, other=0.0)[None, :]
    if bias is not None:
        result += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    inside = (rows < num_rows)[:, None] & is_column[None, :]
    offsets = rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    weight_data: tl.tensor,
    x_scale: tl.tensor,
    weight_scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    arrivals: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    segment_depth: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    P: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    tile = program // P.num_segments if P.segments_in_grid else program
    tile_m, tile_n = tile_of_program(tile, num_rows, num_columns, P.block_m, P.block_n, P.group_m)
    rows = tile_m * P.block_m + tl.arange(0, P.block_m)
    columns = tile_n * P.block_n + tl.arange(0, P.block_n)
    # A tile that reaches over the edge reads rows that exist, and stores nothing of them.
    row_index = tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None]
    column_index = tl.minimum(columns, num_columns - 1).to(tl.int64)[:, None]
    inner = tl.arange(0, P.block_k)[None, :]
    operands = (
        x,
        weight,
        tile_m * P.block_m,
        tile_n * P.block_n,
        row_index * x_stride + inner,
        column_index * depth + inner,
        depth,
    )
    target = (rows, columns, num_rows, num_columns, out_stride)
    segment = program % P.num_segments if P.segments_in_grid else 0
    begin = segment * segment_depth if P.segments_in_grid else 0
    end = tl.minimum(begin + segment_depth, depth) if P.segments_in_grid else depth
    let_next_start(P.overlaps)
    if P.early_bytes > 0:
        _fetch_early(weight_data, columns, num_columns, begin, end, depth, P)
    wait_for_previous(P.overlaps)
    if P.segments_in_grid:
        total = _segment_sum(operands, begin, end, P)
        if leave_segment(total, partial, arrivals, tile, segment, P.num_segments):
            merged = sum_segments(
                partial, arrivals, tile, P.num_segments, total.shape[0], total.shape[1]
            )
            _store_tile(merged, x_scale, weight_scale, bias, out, target, P)
    elif P.num_segments == 1:
        total = _segment_sum(operands, begin, end, P)
        _store_tile(total, x_scale, weight_scale, bias, out, target, P)
    else:
        total = _all_segments(operands, depth, segment_depth, P)
        _store_tile(total, x_scale, weight_scale, bias, out, target, P)


def product_case(
    name: str, tile: TileConfig, num_segments: int, dtype: str, out_dtype: str, *, scaled: bool
) -> CompileCase:
    """The kernel as `launch_product` launches it on large aligned tensors without a bias."""
    plan = plan_product(tile, num_segments, 4096, aligned=True, overlaps=True)
    x, weight = f"*{dtype}", f"*{dtype}"
    if plan.by_descriptor:
        x = f"tensordesc<{dtype}[{tile.block_m}, {tile.block_k}]>"
        weight = f"tensordesc<{dtype}[{tile.block_n}, {tile.block_k}]>"
    sizes = ("num_columns", "depth", "segment_depth", "x_stride", "out_stride")
    constants: dict[str, object] = {"bias": None, "P": plan}
    early: dict[str, str] = {}
    if plan.early_bytes:
        early = {"weight_data": f"*{dtype}"}
    else:
        constants["weight_data"] = None
    scales: dict[str, str] = {}
    if scaled:
        scales = {"x_scale": "*fp32", "weight_scale": "*fp32"}
    else:
        constants |= {"x_scale": None, "weight_scale": None}
    return CompileCase(
        f"{name} {dtype} {tile.block_m}x{tile.block_n}x{tile.block_k}"
        f" {num_segments} segments{'' if tile.use_descriptors else ' by pointers'}",
        product_kernel,
        {
            "x": x,
            "weight": weight,
            "out": f"*{out_dtype}",
            "partial": "*fp32",
            "arrivals": "*i32",
            "num_rows": "i32",
            **early,
            **scales,
            **dict.fromkeys(sizes, "i32:16"),
        },
        constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
