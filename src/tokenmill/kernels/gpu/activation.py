"""Gated activations, in float32 and rounded once: gate(first half) * second half of a row.

silu        g / (1 + exp(-g))
gelu        g / 2 * (1 + erf(g / sqrt(2)))
gelu_tanh   g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g ** 3)))   Hendrycks, Gimpel, 2016
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch.nn import functional

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


def gated_activation(gate_up: torch.Tensor, kind: Gate, out: torch.Tensor) -> None:
    """Compute gate(first half) * second half of gate_up [N, 2 * size], into out [N, size].

    Both are bfloat16, float16 or float32; rows may lie apart.
    """
    num_rows, size = out.shape
    _check(gate_up, kind, out)
    if num_rows == 0:
        return
    _gated_activation_kernel[(num_rows, cdiv(size, _COLUMNS))](
        gate_up,
        out,
        None,
        gate_up.stride(0),
        out.stride(0),
        SIZE=size,
        BLOCK=_COLUMNS,
        KIND=kind,
        QUANTIZES=False,
        OVERLAPS=overlaps(out.device),
        num_warps=4,
        num_stages=1,
        launch_pdl=overlaps(out.device),
    )


def gated_activation_quantize(
    gate_up: torch.Tensor, kind: Gate, out_q: torch.Tensor, out_scale: torch.Tensor
) -> None:
    """`gated_activation`, and `quantize_rows` of its float32 result.

    out_q is float8_e4m3fn [N, size], rows may lie apart; out_scale float32 with N elements.
    """
    num_rows, size = out_q.shape
    _check(gate_up, kind, out_q)
    check_quantized((num_rows, size), out_q, out_scale)
    if num_rows == 0:
        return
    block = next_power_of_2(size)
    _gated_activation_kernel[(num_rows, 1)](
        gate_up,
        out_q,
        out_scale,
        gate_up.stride(0),
        out_q.stride(0),
        SIZE=size,
        BLOCK=block,
        KIND=kind,
        QUANTIZES=True,
        OVERLAPS=overlaps(out_q.device),
        num_warps=warps_of_row(block),
        num_stages=1,
        launch_pdl=overlaps(out_q.device),
    )


def gated_activation_reference(gate_up: torch.Tensor, kind: Gate, out: torch.Tensor) -> None:
    """`gated_activation` in torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if kind == "silu":
        activated = functional.silu(gate)
    else:
        activated = functional.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none")
    out.copy_(activated * up)


def gated_activation_quantize_reference(
    gate_up: torch.Tensor, kind: Gate, out_q: torch.Tensor, out_scale: torch.Tensor
) -> None:
    """`gated_activation_quantize` in torch."""
    activated = torch.empty(out_q.shape, dtype=torch.float32, device=out_q.device)
    gated_activation_reference(gate_up, kind, activated)
    quantize_rows_reference(activated, out_q, out_scale)


def _check(gate_up: torch.Tensor, kind: Gate, out: torch.Tensor) -> None:
    num_rows, size = out.shape
    assert kind in ("silu", "gelu", "gelu_tanh")
    assert gate_up.shape == (num_rows, 2 * size)
    assert gate_up.stride(1) == out.stride(1) == 1


@triton.jit
def _gated_activation_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    out_scale: tl.tensor,
    gate_up_stride: tl.tensor,
    out_stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    QUANTIZES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    let_next_start(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    source = gate_up + row * gate_up_stride + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)
    if KIND == "silu":
        activated = gate / (1.0 + tl.exp(-gate))
    elif KIND == "gelu":
        activated = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u)); the factor is 2 * sqrt(2 / pi).
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        activated = gate / (1.0 + tl.exp(-twice))
    result = activated * up
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


def compile_cases() -> list[CompileCase]:
    return [
        *(_case(14336, kind) for kind in ("silu", "gelu", "gelu_tanh")),
        _case(14336, "silu", quantizes=True),
        _case(28672, "silu", quantizes=True),
    ]


def _case(size: int, kind: Gate, *, quantizes: bool = False) -> CompileCase:
    signature = {
        "gate_up": "*bf16",
        "out": "*fp8e4nv" if quantizes else "*bf16",
        "gate_up_stride": "i32:16",
        "out_stride": "i32:16",
    }
    block = next_power_of_2(size) if quantizes else _COLUMNS
    constants: dict[str, Any] = {"SIZE": size, "BLOCK": block}
    constants |= {"KIND": kind, "QUANTIZES": quantizes, "OVERLAPS": True}
    if quantizes:
        signature["out_scale"] = "*fp32"
    else:
        constants["out_scale"] = None
    name = f"gated_activation {kind} {size}" + " quantizes" * quantizes
    warps = warps_of_row(block) if quantizes else 4
    return CompileCase(name, _gated_activation_kernel, signature, constants, warps, num_stages=1)
