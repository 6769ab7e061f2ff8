"""Activations, gated and not, against float64, plain and quantised."""

from __future__ import annotations

import math

import pytest
import torch

from tokenmill.kernels.experts import ClampedGate
from tokenmill.kernels.gpu.activation import (
    Gate,
    activation,
    activation_quantize,
    activation_quantize_reference,
    activation_reference,
    gated_activation,
    gated_activation_quantize,
    gated_activation_quantize_reference,
    gated_activation_reference,
)

NAN = float("nan")
KINDS: list[Gate] = ["silu", "gelu", "gelu_tanh"]
CLAMPED = ClampedGate(alpha=1.702, limit=2.0)
SHAPES = [(0, 8), (1, 1), (3, 100), (2, 1024), (2, 1337), (1, 3000)]
ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def activated(gate: torch.Tensor, kind: Gate) -> torch.Tensor:
    gate = gate.double()
    if kind == "silu":
        return gate * torch.sigmoid(gate)
    if kind == "gelu":
        return gate * 0.5 * (1.0 + torch.erf(gate / math.sqrt(2.0)))
    inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
    return gate * 0.5 * (1.0 + torch.tanh(inner))


def exact(gate_up: torch.Tensor, kind: Gate | ClampedGate) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    if isinstance(kind, ClampedGate):
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
        return gate * torch.sigmoid(kind.alpha * gate) * (up + 1.0)
    return activated(gate, kind) * up


def inputs(shape: tuple[int, int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows apart, with gates far out on both sides, between rows of NaN."""
    num_rows, size = shape
    wide = torch.full((num_rows, 2 * size + 16), NAN, device=device, dtype=dtype)
    gate_up = wide[:, : 2 * size]
    gate_up[:] = torch.randn(num_rows, 2 * size, device=device) * 3
    if size > 2:
        gate_up[:, 0], gate_up[:, 1] = -150.0, 150.0
    return gate_up


@pytest.mark.parametrize("kind", [*KINDS, CLAMPED], ids=lambda kind: getattr(kind, "limit", kind))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_gated_activation(
    device: str, kind: Gate | ClampedGate, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    gate_up = inputs(shape, dtype, device)
    wide = torch.full((shape[0], shape[1] + 8), NAN, device=device, dtype=dtype)
    out = wide[:, : shape[1]]
    gated_activation(gate_up, kind, out)
    torch.testing.assert_close(out.double(), exact(gate_up, kind), rtol=ROUNDING[dtype], atol=2e-6)
    assert wide[:, shape[1] :].isnan().all(), "written past a row's end"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_activation(device: str, kind: Gate, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = inputs(shape, dtype, device)[:, : shape[1]]
    wide = torch.full((shape[0], shape[1] + 8), NAN, device=device, dtype=dtype)
    activation(x, kind, wide[:, : shape[1]])
    found = wide[:, : shape[1]].double()
    torch.testing.assert_close(found, activated(x, kind), rtol=ROUNDING[dtype], atol=2e-6)
    assert wide[:, shape[1] :].isnan().all(), "written past a row's end"


@pytest.mark.parametrize("half", [0, 1])
def test_a_clamped_gate_keeps_nan(device: str, half: int) -> None:
    gate_up, out = torch.ones(1, 8, device=device), torch.empty(1, 4, device=device)
    gate_up[0, 4 * half + 2] = NAN
    gated_activation(gate_up, CLAMPED, out)
    assert out.isnan().tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantised(device: str, kind: Gate, shape: tuple[int, int], is_gated: bool) -> None:
    gate_up = inputs(shape, torch.bfloat16, device)
    out_q = torch.full(shape, NAN, device=device).to(torch.float8_e4m3fn)
    out_scale = torch.full((shape[0], 1), NAN, device=device)
    if is_gated:
        gated_activation_quantize(gate_up, kind, out_q, out_scale)
        values = exact(gate_up, kind)
    else:
        activation_quantize(gate_up[:, : shape[1]], kind, out_q, out_scale)
        values = activated(gate_up[:, : shape[1]], kind)

    largest = values.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(out_scale.double(), largest / 448.0, rtol=1e-5, atol=1e-12)
    scale = out_scale.double()
    bound = values.abs().mul(2**-4).maximum(scale * 2**-10) + 1e-5 * largest
    assert ((out_q.double() * scale - values).abs() <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone(device: str, kind: Gate) -> None:
    gate_up = inputs((5, 300), torch.bfloat16, device)
    out = torch.empty(5, 300, device=device)
    gated_activation(gate_up, kind, out)
    for row in range(5):
        alone = torch.empty(1, 300, device=device)
        gated_activation(gate_up[row : row + 1], kind, alone)
        assert alone.equal(out[row : row + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_references_agree_with_float64(kind: Gate) -> None:
    gate_up = inputs((3, 50), torch.bfloat16, "cpu")
    out = torch.empty(3, 50)
    gated_activation_reference(gate_up, kind, out)
    torch.testing.assert_close(out.double(), exact(gate_up, kind), rtol=1e-5, atol=1e-6)
    out_q, out_scale = torch.empty(3, 50, dtype=torch.float8_e4m3fn), torch.empty(3)
    gated_activation_quantize_reference(gate_up, kind, out_q, out_scale)
    dequantized = out_q.double() * out_scale.double().unsqueeze(-1)
    torch.testing.assert_close(
        dequantized, exact(gate_up, kind), rtol=0.07, atol=float(out_scale.max()) * 2**-9
    )
    activation_reference(gate_up[:, :50], kind, out)
    wanted = activated(gate_up[:, :50], kind)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
    activation_quantize_reference(gate_up[:, :50], kind, out_q, out_scale)
    dequantized = out_q.double() * out_scale.double().unsqueeze(-1)
    torch.testing.assert_close(dequantized, wanted, rtol=0.07, atol=float(out_scale.max()) * 2**-9)


def test_the_reference_of_a_clamped_gate_agrees_with_float64() -> None:
    gate_up, out = inputs((3, 50), torch.bfloat16, "cpu"), torch.empty(3, 50)
    gated_activation_reference(gate_up, CLAMPED, out)
    torch.testing.assert_close(out.double(), exact(gate_up, CLAMPED), rtol=1e-5, atol=1e-6)


def test_torch_ops(device: str) -> None:
    gate_up, out = torch.randn(2, 40, device=device), torch.full((2, 20), NAN, device=device)
    torch.ops.tokenmill.gated_activation(gate_up, "silu", out)
    torch.testing.assert_close(out.double(), exact(gate_up, "silu"), rtol=1e-5, atol=1e-6)
    torch.ops.tokenmill.activation(gate_up[:, :20], "gelu_tanh", out)
    wanted = activated(gate_up[:, :20], "gelu_tanh")
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
