"""Activations, in float32 and rounded once: of a row, or gate(first half) * second half of it.

silu        g / (1 + exp(-g))
gelu        g / 2 * (1 + erf(g / sqrt(2)))
gelu_tanh   g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g ** 3)))   Hendrycks, Gimpel, 2016

A `ClampedGate` has its own formula for both halves.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl
from torch.nn import functional

from tokenmill.kernels.experts import ClampedGate, expert_gate
from tokenmill.kernels.gpu.launch import CompileCase, cdiv, define_op, next_power_of_2
from tokenmill.kernels.gpu.overlap import let_next_start, overlaps, wait_for_previous
from tokenmill.kernels.gpu.row_quantization import (
    check_quantized,
    quantize_rows_reference,
    store_quantized,
    warps_of_row,
)

Gate = Literal["silu", "gelu", "gelu_tanh"]

_COLUMNS = 1024
"""Columns of one program: with four warps, a vector load of each half a thread."""


def gated_activation(gate_up: torch.Tensor, kind: Gate | ClampedGate, out: torch.Tensor) -> None:
    """Compute gate(first half) * second half of gate_up [N, 2 * size], into out [N, size].

    Both are bfloat16, float16 or float32; rows may lie apart.
    """
    _launch(gate_up, kind, out, is_gated=True)


def gated_activation_quantize(
    gate_up: torch.Tensor, kind: Gate, out_q: torch.Tensor, out_scale: torch.Tensor
) -> None:
    """`gated_activation`, and `quantize_rows` of its float32 result.

    out_q is float8_e4m3fn [N, size], rows may lie apart; out_scale float32 with N elements.
    """
    _launch_quantize(gate_up, kind, out_q, out_scale, is_gated=True)


def activation(x: torch.Tensor, kind: Gate, out: torch.Tensor) -> None:
    """Compute the activation of x [N, size], into out [N, size].

    Both are bfloat16, float16 or float32; rows may lie apart.
    """
    _launch(x, kind, out, is_gated=False)


def activation_quantize(
    x: torch.Tensor, kind: Gate, out_q: torch.Tensor, out_scale: torch.Tensor
) -> None:
    """`activation`, and `quantize_rows` of its float32 result, as `gated_activation_quantize`."""
    _launch_quantize(x, kind, out_q, out_scale, is_gated=False)


def gated_activation_reference(
    gate_up: torch.Tensor, kind: Gate | ClampedGate, out: torch.Tensor
) -> None:
    """`gated_activation` in torch."""
    if isinstance(kind, ClampedGate):
        out.copy_(expert_gate(gate_up.float(), kind))
        return
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(_activated_reference(gate, kind) * up)


def gated_activation_quantize_reference(
    gate_up: torch.Tensor, kind: Gate, out_q: torch.Tensor, out_scale: torch.Tensor
) -> None:
    """`gated_activation_quantize` in torch."""
    activated = torch.empty(out_q.shape, dtype=torch.float32, device=out_q.device)
    gated_activation_reference(gate_up, kind, activated)
    quantize_rows_reference(activated, out_q, out_scale)


def activation_reference(x: torch.Tensor, kind: Gate, out: torch.Tensor) -> None:
    """`activation` in torch."""
    out.copy_(_activated_reference(x.float(), kind))


def activation_quantize_reference(
    x: torch.Tensor, kind: Gate, out_q: torch.Tensor, out_scale: torch.Tensor
) -> None:
    """`activation_quantize` in torch."""
    quantize_rows_reference(_activated_reference(x.float(), kind), out_q, out_scale)


def _activated_reference(values: torch.Tensor, kind: Gate) -> torch.Tensor:
    if kind == "silu":
        return functional.silu(values)
    return functional.gelu(values, approximate="tanh" if kind == "gelu_tanh" else "none")


def _launch(
    x: torch.Tensor, kind: Gate | ClampedGate, out: torch.Tensor, *, is_gated: bool
) -> None:
    num_rows, size = out.shape
    _check(x, kind, out, is_gated=is_gated)
    if num_rows == 0:
        return
    _activation_kernel[(num_rows, cdiv(size, _COLUMNS))](
        x,
        out,
        None,
        x.stride(0),
        out.stride(0),
        SIZE=size,
        BLOCK=_COLUMNS,
        **_formula(kind, is_gated),
        QUANTIZES=False,
        OVERLAPS=overlaps(out.device),
        num_warps=4,
        num_stages=1,
        launch_pdl=overlaps(out.device),
    )


def _launch_quantize(
    x: torch.Tensor, kind: Gate, out_q: torch.Tensor, out_scale: torch.Tensor, *, is_gated: bool
) -> None:
    num_rows, size = out_q.shape
    _check(x, kind, out_q, is_gated=is_gated)
    check_quantized((num_rows, size), out_q, out_scale)
    if num_rows == 0:
        return
    block = next_power_of_2(size)
    _activation_kernel[(num_rows, 1)](
        x,
        out_q,
        out_scale,
        x.stride(0),
        out_q.stride(0),
        SIZE=size,
        BLOCK=block,
        **_formula(kind, is_gated),
        QUANTIZES=True,
        OVERLAPS=overlaps(out_q.device),
        num_warps=warps_of_row(block),
        num_stages=1,
        launch_pdl=overlaps(out_q.device),
    )


def _check(x: torch.Tensor, kind: Gate | ClampedGate, out: torch.Tensor, *, is_gated: bool) -> None:
    num_rows, size = out.shape
    assert kind in get_args(Gate) or (is_gated and isinstance(kind, ClampedGate))
    assert x.shape == (num_rows, 2 * size if is_gated else size)
    assert x.stride(1) == out.stride(1) == 1


def _formula(kind: Gate | ClampedGate, is_gated: bool) -> dict[str, Any]:
    """The kernel's constants that say what it computes."""
    if isinstance(kind, ClampedGate):
        return {"KIND": "clamped", "GATED": True, "ALPHA": kind.alpha, "LIMIT": kind.limit}
    return {"KIND": kind, "GATED": is_gated, "ALPHA": 0.0, "LIMIT": 0.0}


@triton.jit
def _activation_kernel(
    x: tl.tensor,
    out: tl.tensor,
    out_scale: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    QUANTIZES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    let_next_start(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    source = x + row * x_stride + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if KIND == "silu":
        result = gate / (1.0 + tl.exp(-gate))
    elif KIND == "gelu":
        result = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u)); the factor is 2 * sqrt(2 / pi).
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-twice))
    else:
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # keeps NaN, unlike a minimum
        result = gate / (1.0 + tl.exp(-ALPHA * gate))
    if GATED:
        up = tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)
        if KIND == "clamped":
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        result *= up
    target = out + row * out_stride + column
    if QUANTIZES:
        store_quantized(result, mask, target, out_scale + row)
    else:
        tl.store(target, result.to(out.dtype.element_ty), mask=mask)


define_op(
    "gated_activation(Tensor gate_up, str kind, Tensor(a!) out) -> ()",
    cuda=gated_activation,
    cpu=gated_activation_reference,
)
define_op(
    "gated_activation_quantize(Tensor gate_up, str kind, Tensor(a!) out_q, Tensor(b!) out_scale)"
    " -> ()",
    cuda=gated_activation_quantize,
    cpu=gated_activation_quantize_reference,
)
define_op(
    "activation(Tensor x, str kind, Tensor(a!) out) -> ()",
    cuda=activation,
    cpu=activation_reference,
)
define_op(
    "activation_quantize(Tensor x, str kind, Tensor(a!) out_q, Tensor(b!) out_scale) -> ()",
    cuda=activation_quantize,
    cpu=activation_quantize_reference,
)


def compile_cases() -> list[CompileCase]:
    return [
        *(_case(14336, kind) for kind in get_args(Gate)),
        _case(2880, ClampedGate(alpha=1.702, limit=7.0)),
        _case(14336, "silu", quantizes=True),
        _case(28672, "silu", quantizes=True),
        _case(3072, "gelu_tanh", is_gated=False),
        _case(3072, "gelu_tanh", is_gated=False, quantizes=True),
    ]


def _case(
    size: int, kind: Gate | ClampedGate, *, is_gated: bool = True, quantizes: bool = False
) -> CompileCase:
    signature = {
        "x": "*bf16",
        "out": "*fp8e4nv" if quantizes else "*bf16",
        "x_stride": "i32:16",
        "out_stride": "i32:16",
    }
    block = next_power_of_2(size) if quantizes else _COLUMNS
    formula = _formula(kind, is_gated)
    constants: dict[str, Any] = {"SIZE": size, "BLOCK": block, **formula}
    constants |= {"QUANTIZES": quantizes, "OVERLAPS": True}
    if quantizes:
        signature["out_scale"] = "*fp32"
    else:
        constants["out_scale"] = None
    name = f"{'gated_' * is_gated}activation {formula['KIND']} {size}" + " quantizes" * quantizes
    warps = warps_of_row(block) if quantizes else 4
    return CompileCase(name, _activation_kernel, signature, constants, warps, num_stages=1)
