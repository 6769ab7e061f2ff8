"""Activations and norms in torch, against float64, and the same bits wherever a row stands."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tokenmill.kernels.activation import activation, gated_activation, soft_cap
from tokenmill.kernels.norm import layer_norm, rms_norm


def of_torch(x: torch.Tensor, gate: str) -> torch.Tensor:
    x = x.double()
    return functional.silu(x) if gate == "silu" else functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_activations(gate) -> None:
    x = 6 * torch.randn(7, 66)
    x[0, :4] = torch.tensor([-1e4, 1e4, -90.0, 0.0])
    torch.testing.assert_close(
        activation(x, gate).double(), of_torch(x, gate), rtol=1e-5, atol=1e-6
    )
    first, up = x.chunk(2, dim=-1)
    expected = of_torch(first, gate) * up.double()
    torch.testing.assert_close(gated_activation(x, gate).double(), expected, rtol=1e-5, atol=1e-5)
    assert gated_activation(x.bfloat16(), gate).dtype == torch.bfloat16


@pytest.mark.parametrize("cap", [5.0, 30.0])
def test_soft_cap(cap: float) -> None:
    logits = torch.cat([torch.linspace(-400, 400, 999), torch.tensor([0.0, -1e30, 1e30])])
    found = soft_cap(logits, cap)
    expected = cap * torch.tanh(logits.double() / cap)
    assert (found.double() - expected).abs().max() < cap * 3e-7
    assert logits[0] == -400  # its argument is left alone


def test_layer_norm() -> None:
    x, weight, bias = 3 + torch.randn(5, 48), torch.randn(48), torch.randn(48)
    expected = functional.layer_norm(x.double(), (48,), weight.double(), bias.double(), 1e-5)
    found = layer_norm(x, weight, bias, 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [33, 64, 97])
def test_rows_have_the_same_bits_alone(size: int) -> None:
    x, weight = torch.randn(37, size), torch.randn(size)
    functions = [
        lambda rows: activation(rows, "gelu_tanh"),
        lambda rows: soft_cap(rows, 3.0),
        lambda rows: rms_norm(rows, weight, 1e-6),
        lambda rows: layer_norm(rows, weight, weight, 1e-6),
    ]
    for function in functions:
        whole = function(x)
        for row in range(len(x)):
            assert torch.equal(function(x[row : row + 1])[0], whole[row])
