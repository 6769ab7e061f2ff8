"""Linear kernels: right against float64, and exact for any number of rows."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.activation import gated_activation
from tokenmill.kernels.linear import linear, linear_float32
from tokenmill.kernels.norm import rms_norm
from tokenmill.kernels.rotary import apply_rotary

SHAPES = [(1, 1), (7, 3), (64, 48), (576, 1536), (100, 1031)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_linear_equals_float64(num_inputs, num_outputs, dtype):
    x = random(45, num_inputs, dtype=dtype)
    weight = random(num_outputs, num_inputs, dtype=dtype, seed=1)
    bias = random(num_outputs, dtype=dtype, seed=2)
    exact = x.double() @ weight.double().t()
    scale = num_inputs**0.5
    plain = linear(x, weight)
    assert plain.dtype == dtype
    torch.testing.assert_close(
        plain.double() / scale, exact / scale, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    torch.testing.assert_close(
        linear(x, weight, bias).double() / scale,
        (exact + bias.double()) / scale,
        atol=TOLERANCE[dtype],
        rtol=TOLERANCE[dtype],
    )
    logits = linear_float32(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double() / scale, exact / scale, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_linear_rows_do_not_depend_on_the_batch(num_inputs, num_outputs, dtype):
    x = random(71, num_inputs, dtype=dtype)
    weight = random(num_outputs, num_inputs, dtype=dtype, seed=1)
    bias = random(num_outputs, dtype=dtype, seed=2)
    kernels = [
        lambda rows: linear(rows, weight),
        lambda rows: linear(rows, weight, bias),
        lambda rows: linear_float32(rows, weight),
    ]
    for kernel in kernels:
        whole = kernel(x)
        for start, end in [(0, 1), (70, 71), (5, 12), (3, 36), (1, 71)]:
            assert torch.equal(kernel(x[start:end].clone()), whole[start:end])


def test_no_rows_give_no_rows():
    weight = random(5, 3)
    assert linear(random(0, 3), weight).shape == (0, 5)
    assert linear_float32(random(0, 3), weight).shape == (0, 5)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_row_kernels_do_not_depend_on_the_batch(num_threads):
    """Odd sizes and many rows: threads cut the work in the middle of rows and vectors."""
    num_rows, width = 701, 101
    x = random(num_rows, 2 * width) * 8
    weight = random(2 * width, seed=1)
    angles = random(num_rows, 25, seed=2)
    kernels = [
        lambda rows: rms_norm(x[rows], weight, 1e-5),
        lambda rows: gated_activation(x[rows], "silu"),
        lambda rows: apply_rotary(
            x[rows].view(-1, 2, width), angles[rows].cos(), angles[rows].sin()
        ),
    ]
    before = torch.get_num_threads()
    for kernel in kernels:
        torch.set_num_threads(2)
        whole = kernel(slice(None))
        torch.set_num_threads(num_threads)
        for start, end in [(0, 1), (700, 701), (5, 12), (0, 350), (350, 701), (0, 701)]:
            assert torch.equal(kernel(slice(start, end)), whole[start:end])
    torch.set_num_threads(before)


def test_row_kernels_equal_their_definitions():
    x = random(9, 64) * 4
    weight = random(64, seed=1)
    wide = x.double()
    norm = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), norm, atol=1e-5, rtol=1e-5)
    gated = torch.nn.functional.silu(wide[:, :32]) * wide[:, 32:]
    torch.testing.assert_close(gated_activation(x, "silu").double(), gated, atol=1e-5, rtol=1e-5)
    angles = random(9, 5, seed=2).double()
    pairs = torch.complex(wide[:, :5], wide[:, 5:10]) * torch.polar(torch.ones_like(angles), angles)
    rotated = apply_rotary(x[:, None, :], angles.cos().float(), angles.sin().float())[:, 0].double()
    expected = torch.cat([pairs.real, pairs.imag, wide[:, 10:]], dim=-1)
    torch.testing.assert_close(rotated, expected, atol=1e-5, rtol=1e-5)
