"""Writing the tables of the running requests on the device, and gathering rows of any table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu import inputs_reference as reference
from tokenmill.kernels.gpu.launch import CompileCase, cdiv, define_op

_TOKENS = 128
"""Tokens of one program, one for each thread."""
_VALUES = 512
"""Values of a segment that a program copies, and elements of a row."""
_NUM_WARPS = 4


def write_segments(
    table: torch.Tensor, data: torch.Tensor, dst_start: torch.Tensor, src_start: torch.Tensor
) -> None:
    """Copy data[src_start[i] : src_start[i + 1]] to table, from dst_start[i] on, for each i.

    table and data are int32 and flat; dst_start is int64 [k], src_start int32 [k + 1], beginning
    with 0. Data behind src_start[-1] is padding. Segments do not overlap.
    """
    assert table.dtype == data.dtype == src_start.dtype == torch.int32
    assert dst_start.dtype == torch.int64
    assert len(src_start) == len(dst_start) + 1
    assert all(x.is_contiguous() for x in (table, data, dst_start, src_start))
    if len(data) == 0:
        return
    _write_segments_kernel[(cdiv(len(data), _VALUES),)](
        table,
        data,
        dst_start,
        src_start,
        len(dst_start),
        len(data),
        len(dst_start).bit_length(),
        VALUES=_VALUES,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


def commit_tokens(
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    sampled: torch.Tensor,
    is_due: torch.Tensor | None = None,
) -> None:
    """Write sampled[i] to token_ids[rows[i], positions[i]], where is_due[i], or everywhere.

    token_ids is int32 [max_num_seqs, max_model_len]; rows, positions and sampled are int32 or
    int64 [n], is_due bool [n]. A negative row, and a position outside the table, write nothing.
    """
    assert token_ids.dtype == torch.int32
    assert token_ids.stride(1) == 1
    given = [x for x in (rows, positions, sampled, is_due) if x is not None]
    assert all(x.shape == rows.shape and x.is_contiguous() for x in given)
    num_tokens = rows.shape[0]
    if num_tokens == 0:
        return
    _commit_tokens_kernel[(cdiv(num_tokens, _TOKENS),)](
        token_ids,
        rows,
        positions,
        sampled,
        is_due,
        num_tokens,
        token_ids.stride(0),
        token_ids.shape[1],
        TOKENS=_TOKENS,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


def gather_rows(table: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
    """Copy row indices[i] of table [num_rows, size] to row i of out [n, size], in out's dtype.

    indices is int32 or int64 [n]; a negative one leaves its row as it is. Rows may lie apart.
    """
    num_rows, size = out.shape
    assert indices.shape == (num_rows,)
    assert indices.is_contiguous()
    assert table.shape[1] == size
    assert table.stride(1) == out.stride(1) == 1
    if num_rows == 0:
        return
    _gather_rows_kernel[(num_rows, cdiv(size, _VALUES))](
        table,
        indices,
        out,
        table.stride(0),
        out.stride(0),
        SIZE=size,
        VALUES=_VALUES,
        num_warps=2,
        num_stages=1,
    )


@triton.jit
def find_run(
    starts: tl.tensor,
    num_runs: tl.tensor,
    num_halvings: tl.tensor,
    place: tl.tensor,
    mask: tl.tensor,
) -> tl.tensor:
    """The last run that does not start behind the place; mask says which places lie in one.

    num_halvings is at least the logarithm of num_runs.
    """
    low = tl.zeros_like(place)
    high = low + num_runs
    for _ in range(num_halvings):
        middle = (low + high) // 2
        is_not_behind = tl.load(starts + middle, mask=mask, other=0) <= place
        low = tl.where(is_not_behind, middle, low)
        high = tl.where(is_not_behind, high, middle)
    return low


# What changes from step to step must not choose a compiled variant: numbers, and where in a buffer
# of staged numbers an array begins.
@triton.jit(
    do_not_specialize=["num_segments", "num_data", "num_halvings"],
    do_not_specialize_on_alignment=["data", "dst_start", "src_start"],
)
def _write_segments_kernel(
    table: tl.tensor,
    data: tl.tensor,
    dst_start: tl.tensor,
    src_start: tl.tensor,
    num_segments: tl.tensor,
    num_data: tl.tensor,
    num_halvings: tl.tensor,
    VALUES: tl.constexpr,
) -> None:
    place = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    mask = (place < num_data) & (place < tl.load(src_start + num_segments))
    segment = find_run(src_start, num_segments, num_halvings, place, mask)
    offset = place - tl.load(src_start + segment, mask=mask, other=0)
    target = table + tl.load(dst_start + segment, mask=mask, other=0) + offset
    tl.store(target, tl.load(data + place, mask=mask), mask=mask)


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["rows", "positions", "sampled", "is_due"],
)
def _commit_tokens_kernel(
    token_ids: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    sampled: tl.tensor,
    is_due: tl.tensor,
    num_tokens: tl.tensor,
    token_ids_stride: tl.tensor,
    max_len: tl.tensor,
    TOKENS: tl.constexpr,
) -> None:
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = token < num_tokens
    row = tl.load(rows + token, mask=mask, other=-1).to(tl.int64)
    position = tl.load(positions + token, mask=mask, other=-1)
    if is_due is not None:
        mask = tl.load(is_due + token, mask=mask, other=0) != 0
    mask = mask & (row >= 0) & (position >= 0) & (position < max_len)
    token_id = tl.load(sampled + token, mask=mask, other=0).to(tl.int32)
    tl.store(token_ids + row * token_ids_stride + position, token_id, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["indices"])
def _gather_rows_kernel(
    table: tl.tensor,
    indices: tl.tensor,
    out: tl.tensor,
    table_stride: tl.tensor,
    out_stride: tl.tensor,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(indices + row).to(tl.int64)
    if index >= 0:
        element = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
        mask = element < SIZE
        values = tl.load(table + index * table_stride + element, mask=mask)
        target = out + row * out_stride + element
        tl.store(target, values.to(out.dtype.element_ty), mask=mask)


define_op(
    "write_segments(Tensor(a!) table, Tensor data, Tensor dst_start, Tensor src_start) -> ()",
    cuda=write_segments,
    cpu=reference.write_segments_reference,
)
define_op(
    "commit_tokens(Tensor(a!) token_ids, Tensor rows, Tensor positions, Tensor sampled,"
    " Tensor? is_due=None) -> ()",
    cuda=commit_tokens,
    cpu=reference.commit_tokens_reference,
)
define_op(
    "gather_rows(Tensor table, Tensor indices, Tensor(a!) out) -> ()",
    cuda=gather_rows,
    cpu=reference.gather_rows_reference,
)


def compile_cases() -> list[CompileCase]:
    segments = {"table": "*i32", "data": "*i32", "dst_start": "*i64", "src_start": "*i32"}
    segments |= dict.fromkeys(("num_segments", "num_data", "num_halvings"), "i32")
    tokens = {"token_ids": "*i32", "rows": "*i32", "positions": "*i64", "sampled": "*i64"}
    tokens |= {"num_tokens": "i32", "token_ids_stride": "i32:16", "max_len": "i32:16"}
    rows = {"table": "*bf16", "indices": "*i64", "out": "*bf16"}
    rows |= {"table_stride": "i32:16", "out_stride": "i32:16"}
    one_tile = {"TOKENS": _TOKENS}
    return [
        CompileCase(
            "write_segments", _write_segments_kernel, segments, {"VALUES": _VALUES}, _NUM_WARPS, 1
        ),
        CompileCase(
            "commit_tokens", _commit_tokens_kernel, {**tokens, "is_due": "*i1"}, one_tile, 4, 1
        ),
        CompileCase(
            "commit_tokens everywhere", _commit_tokens_kernel, tokens, one_tile | {"is_due": None}
        ),
        CompileCase(
            "gather_rows 4096", _gather_rows_kernel, rows, {"SIZE": 4096, "VALUES": _VALUES}, 2, 1
        ),
    ]
