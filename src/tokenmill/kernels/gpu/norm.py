"""Residual addition and a norm in one pass over memory, in float32; torch's in `kernels/norm.py`.

    residual += x
    out = residual / sqrt(mean(residual ** 2) + eps) * weight                         RMSNorm
    out = centred / sqrt(mean(centred ** 2) + eps) * weight + bias                    LayerNorm
          where centred = residual - mean(residual)

One program computes one row, so a row has the same bits whatever the other rows are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.launch import CompileCase, define_op, next_power_of_2
from tokenmill.kernels.gpu.overlap import let_next_start, overlaps, wait_for_previous
from tokenmill.kernels.gpu.row_quantization import (
    check_quantized,
    quantize_rows_reference,
    store_quantized,
    warps_of_row,
)
from tokenmill.kernels.norm import layer_norm, rms_norm

MAX_HIDDEN_SIZE = 16384
"""A row must fit in one program's registers, twice."""


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    starts_stream: bool = False,
) -> None:
    """Add x to the residual in place, and put the sum's RMSNorm into out.

    x is bfloat16, float16 or float32 [N, size], the residual float32 of that shape, the weight
    float32 [size]; out has x's shape and any of these dtypes. Rows of x and out may lie apart.
    Where the stream starts, the residual is not read: it becomes x.
    """
    assert out.shape == x.shape
    assert out.stride(1) == 1
    _launch(x, residual, weight, None, eps, out, None, starts_stream)


def add_rms_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out_q: torch.Tensor,
    out_scale: torch.Tensor,
    *,
    starts_stream: bool = False,
) -> None:
    """`add_rms_norm`, and `quantize_rows` of its float32 result.

    out_q is float8_e4m3fn [N, size], rows may lie apart; out_scale float32 with N elements.
    """
    check_quantized(x.shape, out_q, out_scale)
    _launch(x, residual, weight, None, eps, out_q, out_scale, starts_stream)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    starts_stream: bool = False,
) -> None:
    """`add_rms_norm` with LayerNorm; the bias is float32 [size]."""
    assert out.shape == x.shape
    assert out.stride(1) == 1
    _launch(x, residual, weight, bias, eps, out, None, starts_stream)


def add_layer_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out_q: torch.Tensor,
    out_scale: torch.Tensor,
    *,
    starts_stream: bool = False,
) -> None:
    """`add_rms_norm_quantize` with LayerNorm; the bias is float32 [size]."""
    check_quantized(x.shape, out_q, out_scale)
    _launch(x, residual, weight, bias, eps, out_q, out_scale, starts_stream)


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    starts_stream: bool = False,
) -> None:
    """`add_rms_norm` in torch."""
    residual.copy_(x if starts_stream else residual + x)
    out.copy_(rms_norm(residual, weight, eps))


def add_rms_norm_quantize_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out_q: torch.Tensor,
    out_scale: torch.Tensor,
    *,
    starts_stream: bool = False,
) -> None:
    """`add_rms_norm_quantize` in torch."""
    normed = torch.empty_like(residual)
    add_rms_norm_reference(x, residual, weight, eps, normed, starts_stream=starts_stream)
    quantize_rows_reference(normed, out_q, out_scale)


def add_layer_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    starts_stream: bool = False,
) -> None:
    """`add_layer_norm` in torch."""
    residual.copy_(x if starts_stream else residual + x)
    out.copy_(layer_norm(residual, weight, bias, eps))


def add_layer_norm_quantize_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out_q: torch.Tensor,
    out_scale: torch.Tensor,
    *,
    starts_stream: bool = False,
) -> None:
    """`add_layer_norm_quantize` in torch."""
    normed = torch.empty_like(residual)
    add_layer_norm_reference(x, residual, weight, bias, eps, normed, starts_stream=starts_stream)
    quantize_rows_reference(normed, out_q, out_scale)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    starts_stream: bool,
) -> None:
    num_rows, size = x.shape
    assert size <= MAX_HIDDEN_SIZE
    assert x.stride(1) == 1
    assert residual.shape == x.shape
    assert residual.dtype == weight.dtype == torch.float32
    assert residual.is_contiguous()
    for factor in (weight, bias):
        assert factor is None or (factor.shape == (size,) and factor.is_contiguous())
    assert bias is None or bias.dtype == torch.float32
    if num_rows == 0:
        return
    block = next_power_of_2(size)
    _add_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        bias,
        out,
        out_scale,
        eps,
        x.stride(0),
        out.stride(0),
        SIZE=size,
        BLOCK=block,
        STARTS_STREAM=starts_stream,
        QUANTIZES=out_scale is not None,
        OVERLAPS=overlaps(x.device),
        num_warps=warps_of_row(block),
        num_stages=1,
        launch_pdl=overlaps(x.device),
    )


@triton.jit
def _add_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    out_scale: tl.tensor,
    eps: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    STARTS_STREAM: tl.constexpr,
    QUANTIZES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    let_next_start(OVERLAPS)
    factors = tl.load(weight + column, mask=mask, other=0.0)
    if bias is not None:
        shifts = tl.load(bias + column, mask=mask, other=0.0)
    wait_for_previous(OVERLAPS)
    total = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    stream = residual + row * SIZE + column
    if not STARTS_STREAM:
        total += tl.load(stream, mask=mask, other=0.0)
    tl.store(stream, total, mask=mask)

    if bias is not None:
        total = tl.where(mask, total - tl.sum(total, axis=0) / SIZE, 0.0)
    mean_square = tl.sum(total * total, axis=0) / SIZE
    scaled = total * (1.0 / tl.sqrt_rn(mean_square + eps))
    normed = scaled * factors
    if bias is not None:
        normed += shifts
    target = out + row * out_stride + column
    if QUANTIZES:
        store_quantized(normed, mask, target, out_scale + row)
    else:
        tl.store(target, normed.to(out.dtype.element_ty), mask=mask)


define_op(
    "add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps, Tensor(b!) out, *,"
    " bool starts_stream=False) -> ()",
    cuda=add_rms_norm,
    cpu=add_rms_norm_reference,
)
define_op(
    "add_rms_norm_quantize(Tensor x, Tensor(a!) residual, Tensor weight, float eps,"
    " Tensor(b!) out_q, Tensor(c!) out_scale, *, bool starts_stream=False) -> ()",
    cuda=add_rms_norm_quantize,
    cpu=add_rms_norm_quantize_reference,
)
define_op(
    "add_layer_norm(Tensor x, Tensor(a!) residual, Tensor weight, Tensor bias, float eps,"
    " Tensor(b!) out, *, bool starts_stream=False) -> ()",
    cuda=add_layer_norm,
    cpu=add_layer_norm_reference,
)
define_op(
    "add_layer_norm_quantize(Tensor x, Tensor(a!) residual, Tensor weight, Tensor bias, float eps,"
    " Tensor(b!) out_q, Tensor(c!) out_scale, *, bool starts_stream=False) -> ()",
    cuda=add_layer_norm_quantize,
    cpu=add_layer_norm_quantize_reference,
)


def compile_cases() -> list[CompileCase]:
    return [
        _case(4096),
        _case(4096, starts_stream=True),
        _case(4096, quantizes=True),
        _case(5120),
        _case(16384),
        _case(16384, quantizes=True),
        _case(1024, has_bias=True),
        _case(12288, has_bias=True, starts_stream=True),
        _case(4096, has_bias=True, quantizes=True),
    ]


def _case(
    size: int, *, starts_stream: bool = False, quantizes: bool = False, has_bias: bool = False
) -> CompileCase:
    signature = {
        "x": "*bf16",
        "residual": "*fp32",
        "weight": "*fp32",
        "out": "*fp8e4nv" if quantizes else "*bf16",
        "eps": "fp32",
        "x_stride": "i32:16",
        "out_stride": "i32:16",
    }
    constants: dict[str, Any] = {
        "SIZE": size,
        "BLOCK": next_power_of_2(size),
        "STARTS_STREAM": starts_stream,
        "QUANTIZES": quantizes,
        "OVERLAPS": True,
    }
    if quantizes:
        signature["out_scale"] = "*fp32"
    else:
        constants["out_scale"] = None
    if has_bias:
        signature["bias"] = "*fp32"
    else:
        constants["bias"] = None
    name = f"add_{'layer' if has_bias else 'rms'}_norm {size}"
    name += " starts" * starts_stream + " quantizes" * quantizes
    warps = warps_of_row(next_power_of_2(size))
    return CompileCase(
        name,
        _add_norm_kernel,
        signature,
        constants,
        warps,
        num_stages=1,
        reads_weights_early=True,
    )
