"""State-space layers on a GPU (`kernels/state_space.py` has the mathematics and the reference).

    place    which of its two places a request reads, and what it will have written; one program a
             request
    scan     convolution, state and result, token by token; one program a request and head
    gate     a gated norm of each group; one program a token and group

Everything is float32. A program goes through its tokens one by one, so a token's bits depend on
those before it and on nothing else, and a step's numbers are read on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.launch import CompileCase, next_power_of_2
from tokenmill.kernels.gpu.state_scan import TABLES, scan_kernel, scan_shape
from tokenmill.kernels.state_space import StateCache, StateSpaceShape, StateSpaceWeights

_NOTHING = tl.constexpr(-1)
Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""query_start_loc int32 [num_reqs + 1], seq_lens int32 [num_reqs], block_table int32 [num_reqs,
max_blocks]."""


def state_space(
    shape: StateSpaceShape,
    weights: StateSpaceWeights,
    cache: StateCache,
    tables: Tables,
    block_size: int,
    projected: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Put the results of a step into out [num_tokens, num_heads * head_size], and its states into
    the cache.

    projected is [num_tokens, gates, inputs and dt], rows may lie apart; it and out are bfloat16,
    float16 or float32. Tables are as for attention, with the blocks of states; block 0 keeps
    nothing. Requests without tokens touch nothing.
    """
    _, seq_lens, block_table = tables
    num_reqs, num_tokens = len(seq_lens), len(projected)
    assert projected.shape == (num_tokens, sum(shape.parts))
    assert projected.stride(1) == block_table.stride(1) == 1
    assert all(t.is_contiguous() for t in (cache.num_seen, cache.values))
    if num_reqs == 0 or num_tokens == 0:
        return
    places = torch.empty(num_reqs, dtype=torch.int32, device=projected.device)
    _place_kernel[(num_reqs,)](
        *tables, cache.num_seen, places, block_table.stride(0), BLOCK_SIZE=block_size, num_warps=1
    )
    scanned = torch.empty(num_tokens, shape.num_inner, device=projected.device)
    low, high = shape.dt_limits
    scan = scan_shape(shape, block_size)
    scan_kernel[(num_reqs, shape.num_heads)](
        projected,
        *tables,
        places,
        weights.conv_weight,
        weights.conv_bias,
        weights.a,
        weights.d,
        weights.dt_bias,
        cache.values,
        scanned,
        projected.stride(0),
        block_table.stride(0),
        low,
        min(high, torch.finfo(torch.float32).max),
        S=scan,
        num_warps=scan.num_warps,
        num_stages=1,
    )
    _gate(shape, scanned, projected, weights.norm_weight, out)


def _gate(
    shape: StateSpaceShape,
    scanned: torch.Tensor,
    projected: torch.Tensor,
    norm_weight: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """RMSNorm of scanned * silu(gate), in each group."""
    assert out.shape == scanned.shape
    assert out.stride(1) == 1
    group_size = shape.num_inner // shape.num_groups
    _gate_kernel[(len(scanned), shape.num_groups)](
        scanned,
        projected,
        norm_weight,
        out,
        projected.stride(0),
        out.stride(0),
        shape.norm_eps,
        SIZE=group_size,
        BLOCK=next_power_of_2(group_size),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=TABLES)
def _place_kernel(
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    num_seen: tl.tensor,
    places: tl.tensor,
    table_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Grid (num_reqs,). States are written behind whole blocks and behind the last token."""
    req = tl.program_id(0)
    query_len = tl.load(query_start_loc + req + 1) - tl.load(query_start_loc + req)
    if query_len > 0:
        seq_len = tl.load(seq_lens + req)
        seen = seq_len - query_len
        table = block_table + req.to(tl.int64) * table_stride
        read_block = tl.load(table + tl.maximum(seen - 1, 0) // BLOCK_SIZE)
        place = tl.where(tl.load(num_seen + read_block * 2) == seen, 0, 1)
        tl.store(places + req, place)
        for first in range(seen // BLOCK_SIZE * BLOCK_SIZE, seq_len, BLOCK_SIZE):
            end = tl.minimum(first + BLOCK_SIZE, seq_len)
            block = tl.load(table + (end - 1) // BLOCK_SIZE)
            if block > 0:
                goes_on = (seen > 0) & (block == read_block)
                # The state that is read stays where it is; no other block keeps an older one.
                kept = tl.where(goes_on, 1 - place, 0)
                tl.store(num_seen + block * 2 + kept, end.to(tl.int64))
                if not goes_on:
                    tl.store(num_seen + block * 2 + 1, tl.full((), _NOTHING, tl.int64))


@triton.jit
def _gate_kernel(
    scanned: tl.tensor,
    projected: tl.tensor,
    norm_weight: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (num_tokens, num_groups): RMSNorm of scanned * silu(gate)."""
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    is_lane = lanes < SIZE
    column = tl.program_id(1) * SIZE + lanes
    width = tl.num_programs(1) * SIZE
    y = tl.load(scanned + token * width + column, mask=is_lane, other=0.0)
    gate = tl.load(projected + token * stride + column, mask=is_lane, other=0.0).to(tl.float32)
    y *= gate / (1.0 + tl.exp(-gate))
    mean = tl.sum(y * y, 0) / SIZE
    y *= 1.0 / tl.sqrt(mean + eps)
    y *= tl.load(norm_weight + column, mask=is_lane, other=0.0)
    tl.store(out + token * out_stride + column, y.to(out.dtype.element_ty), mask=is_lane)


def compile_cases() -> list[CompileCase]:
    """The sizes of Bamba 9B."""
    shape = StateSpaceShape(128, 64, 128, 1, 4, (0.0, float("inf")), 1e-5)
    sizes = scan_shape(shape, 16)
    tables: dict[str, str] = dict.fromkeys(TABLES, "*i32") | {"table_stride": "i32"}
    floats = ("conv_weight", "conv_bias", "a", "d", "dt_bias", "values", "out")
    scan = {"projected": "*bf16", "places": "*i32", "stride": "i32:16"} | tables
    scan |= dict.fromkeys(floats, "*fp32") | {"dt_low": "fp32", "dt_high": "fp32"}
    gate = {"scanned": "*fp32", "projected": "*bf16", "norm_weight": "*fp32", "out": "*bf16"}
    gate |= {"stride": "i32:16", "out_stride": "i32:16", "eps": "fp32"}
    return [
        CompileCase(
            "state space place",
            _place_kernel,
            tables | {"num_seen": "*i64", "places": "*i32"},
            {"BLOCK_SIZE": 16},
            num_warps=1,
        ),
        CompileCase("state space scan", scan_kernel, scan, {"S": sizes}, sizes.num_warps, 1),
        CompileCase("state space gate", _gate_kernel, gate, {"SIZE": 8192, "BLOCK": 8192}),
    ]
