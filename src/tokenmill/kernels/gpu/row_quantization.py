"""Rows as float8 e4m3, each with a scale of its own: value = code * scale of the row.

Finer than one scale a tensor, and found while a row is at hand: what the products with float8
weights take as their activations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.launch import CompileCase, define_op, next_power_of_2
from tokenmill.kernels.gpu.overlap import let_next_start, overlaps, wait_for_previous

LARGEST_CODE = 448.0
"""The largest number of e4m3; a row's largest magnitude becomes it."""
SMALLEST_MAGNITUDE = 1e-10
"""A row whose largest magnitude is below is scaled as if it were this: the reciprocal of a scale
stays finite, and a row of zeros needs no case of its own."""
MAX_COLUMNS = 32768
"""A row must fit in one program's registers."""

_LARGEST_CODE = tl.constexpr(LARGEST_CODE)
_SMALLEST_MAGNITUDE = tl.constexpr(SMALLEST_MAGNITUDE)


def quantize_rows(x: torch.Tensor, out_q: torch.Tensor, out_scale: torch.Tensor) -> None:
    """Quantise x [N, size], bfloat16, float16 or float32, rows may lie apart.

    out_q is float8_e4m3fn [N, size], rows may lie apart; out_scale float32 with N elements. A row's
    result has the same bits whatever the other rows are.
    """
    check_quantized(x.shape, out_q, out_scale)
    assert x.stride(1) == 1
    num_rows, size = x.shape
    if num_rows == 0:
        return
    block = next_power_of_2(size)
    _quantize_rows_kernel[(num_rows,)](
        x,
        out_q,
        out_scale,
        x.stride(0),
        out_q.stride(0),
        SIZE=size,
        BLOCK=block,
        OVERLAPS=overlaps(x.device),
        num_warps=warps_of_row(block),
        num_stages=1,
        launch_pdl=overlaps(x.device),
    )


def quantize_rows_reference(x: torch.Tensor, out_q: torch.Tensor, out_scale: torch.Tensor) -> None:
    """`quantize_rows` in torch."""
    values = x.float()
    scale = values.abs().amax(-1).clamp(min=SMALLEST_MAGNITUDE) / LARGEST_CODE
    out_scale.view(-1).copy_(scale)
    out_q.copy_((values / scale.unsqueeze(-1)).to(torch.float8_e4m3fn))


def check_quantized(
    shape: torch.Size | tuple[int, int], out_q: torch.Tensor, out_scale: torch.Tensor
) -> None:
    """Assert that the outputs can take quantised rows of this shape."""
    num_rows, size = shape
    assert size <= MAX_COLUMNS
    assert out_q.shape == (num_rows, size)
    assert out_q.dtype == torch.float8_e4m3fn
    assert out_q.stride(1) == 1
    assert out_scale.dtype == torch.float32
    assert out_scale.numel() == num_rows
    assert out_scale.is_contiguous()


def warps_of_row(block: int) -> int:
    """Warps of a program that keeps one row of `block` values: 16 to 32 values a thread.

    It depends on the width only, as the order of a row's sum does.
    """
    return min(max(block // 512, 1), 32)


@triton.jit
def store_quantized(
    values: tl.tensor, mask: tl.tensor, out: tl.tensor, scale_out: tl.tensor
) -> None:
    """Store one row of float32 values at the pointers out, and its scale at scale_out.

    Values outside the mask must be 0.
    """
    magnitude = tl.maximum(tl.max(tl.abs(values), axis=0), _SMALLEST_MAGNITUDE)
    scale = magnitude / _LARGEST_CODE
    tl.store(scale_out, scale)
    tl.store(out, (values * (1.0 / scale)).to(tl.float8e4nv), mask=mask)


@triton.jit
def _quantize_rows_kernel(
    x: tl.tensor,
    out_q: tl.tensor,
    out_scale: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    let_next_start(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    values = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    store_quantized(values, mask, out_q + row * out_stride + column, out_scale + row)


define_op(
    "quantize_rows(Tensor x, Tensor(a!) out_q, Tensor(b!) out_scale) -> ()",
    cuda=quantize_rows,
    cpu=quantize_rows_reference,
)


def compile_cases() -> list[CompileCase]:
    return [
        CompileCase(
            f"quantize_rows {size}",
            _quantize_rows_kernel,
            {
                "x": "*bf16",
                "out_q": "*fp8e4nv",
                "out_scale": "*fp32",
                "x_stride": "i32:16",
                "out_stride": "i32:16",
            },
            {"SIZE": size, "BLOCK": next_power_of_2(size), "OVERLAPS": True},
            num_warps=warps_of_row(next_power_of_2(size)),
            num_stages=1,
        )
        for size in (4096, 14336)
    ]
