"""Residual addition and norms against float64, alone and in a batch, plain and quantised."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.gpu.norm import (
    add_layer_norm,
    add_layer_norm_quantize,
    add_layer_norm_quantize_reference,
    add_layer_norm_reference,
    add_rms_norm,
    add_rms_norm_quantize,
    add_rms_norm_quantize_reference,
    add_rms_norm_reference,
)
from tokenmill.kernels.gpu.row_quantization import quantize_rows, quantize_rows_reference

EPS = 1e-5
NAN = float("nan")
SHAPES = [(0, 16), (1, 1), (1, 64), (3, 100), (5, 257), (2, 1536), (1, 5000)]
ROUNDING = {torch.float32: 2**-20, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""More than half a unit in the last place, less than a wrong element would bring."""


def rows_apart(num_rows: int, size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A view whose rows are longer than it is wide, between rows of NaN."""
    wide = torch.full((num_rows, size + 16), NAN, device=device, dtype=dtype)
    wide[:, :size] = torch.randn(num_rows, size, device=device)
    return wide[:, :size]


def exact(total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total = total.double()
    return total * (total.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def exact_layer_norm(total: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    centred = total.double() - total.double().mean(-1, keepdim=True)
    return exact(centred, weight) + bias.double()


def assert_quantized(
    out_q: torch.Tensor, out_scale: torch.Tensor, values: torch.Tensor, slack: float = 1e-5
) -> None:
    """Each code is the nearest to value / scale, and the scale the smallest that reaches all."""
    values = values.double()
    largest = values.abs().amax(-1)
    torch.testing.assert_close(out_scale.double(), largest / 448.0, rtol=slack, atol=1e-12)
    scale = out_scale.double().unsqueeze(-1)
    # Half a step: 2 ** -4 of the value, and below the normal numbers half the smallest code.
    bound = values.abs().mul(2**-4).maximum(scale * 2**-10) + slack * largest.unsqueeze(-1)
    assert ((out_q.double() * scale - values).abs() <= bound).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("starts_stream", [False, True])
def test_sum_and_norm(
    device: str, shape: tuple[int, int], dtype: torch.dtype, starts_stream: bool
) -> None:
    x = rows_apart(*shape, dtype, device)
    residual = torch.randn(shape, device=device) * 3
    if starts_stream:
        residual.fill_(NAN)  # must not be read
    weight = torch.randn(shape[1], device=device)
    total = x.float() if starts_stream else residual + x.float()
    wide = torch.full((shape[0], shape[1] + 8), NAN, device=device, dtype=dtype)
    out = wide[:, : shape[1]]

    add_rms_norm(x, residual, weight, EPS, out, starts_stream=starts_stream)

    assert residual.equal(total)
    torch.testing.assert_close(out.double(), exact(total, weight), rtol=ROUNDING[dtype], atol=1e-6)
    assert wide[:, shape[1] :].isnan().all(), "written past a row's end"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("starts_stream", [False, True])
def test_sum_and_layer_norm(
    device: str, shape: tuple[int, int], dtype: torch.dtype, starts_stream: bool
) -> None:
    x = rows_apart(*shape, dtype, device)
    residual = torch.randn(shape, device=device) + 3  # a mean that must go
    if starts_stream:
        residual.fill_(NAN)
    weight, bias = torch.randn(2, shape[1], device=device)
    total = x.float() if starts_stream else residual + x.float()
    wide = torch.full((shape[0], shape[1] + 8), NAN, device=device, dtype=dtype)
    out = wide[:, : shape[1]]

    add_layer_norm(x, residual, weight, bias, EPS, out, starts_stream=starts_stream)

    assert residual.equal(total)
    wanted = exact_layer_norm(total, weight, bias)
    torch.testing.assert_close(out.double(), wanted, rtol=ROUNDING[dtype], atol=4e-6)
    assert wide[:, shape[1] :].isnan().all(), "written past a row's end"


def test_a_row_has_the_same_layer_norm_alone(device: str) -> None:
    x, stream = torch.randn(2, 5, 200, device=device)
    weight, bias = torch.randn(2, 200, device=device)
    out = torch.empty(5, 200, device=device)
    add_layer_norm(x, stream.clone(), weight, bias, EPS, out)
    for row in range(5):
        alone, out_alone = stream[row : row + 1].clone(), torch.empty(1, 200, device=device)
        add_layer_norm(x[row : row + 1], alone, weight, bias, EPS, out_alone)
        assert out_alone.equal(out[row : row + 1])


def test_quantised_layer_norm(device: str) -> None:
    x, residual = torch.randn(2, 3, 100, device=device) + 1
    weight, bias = torch.randn(2, 100, device=device)
    total = residual + x
    out_q = torch.full((3, 100), NAN, device=device).to(torch.float8_e4m3fn)
    out_scale = torch.full((3, 1), NAN, device=device)
    add_layer_norm_quantize(x, residual, weight, bias, EPS, out_q, out_scale)
    assert residual.equal(total)
    assert_quantized(out_q, out_scale.flatten(), exact_layer_norm(total, weight, bias))


def test_the_output_may_have_another_dtype(device: str) -> None:
    x = torch.randn(3, 96, device=device).bfloat16()
    residual, weight = torch.randn(3, 96, device=device), torch.randn(96, device=device)
    out = torch.full((3, 96), NAN, device=device)
    add_rms_norm(x, residual, weight, EPS, out)
    torch.testing.assert_close(out.double(), exact(residual, weight), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [64, 160, 1536])
def test_a_row_has_the_same_bits_alone(device: str, size: int) -> None:
    x = torch.randn(7, size, device=device).bfloat16()
    stream, weight = torch.randn(7, size, device=device), torch.randn(size, device=device)
    residual, out = stream.clone(), torch.empty(7, size, device=device)
    add_rms_norm(x, residual, weight, EPS, out)
    for row in range(7):
        alone, out_alone = stream[row : row + 1].clone(), torch.empty(1, size, device=device)
        add_rms_norm(x[row : row + 1], alone, weight, EPS, out_alone)
        assert out_alone.equal(out[row : row + 1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("starts_stream", [False, True])
def test_quantised_norm(device: str, shape: tuple[int, int], starts_stream: bool) -> None:
    x = rows_apart(*shape, torch.bfloat16, device)
    residual = torch.randn(shape, device=device)
    weight = torch.randn(shape[1], device=device)
    total = x.float() if starts_stream else residual + x.float()
    out_q = torch.full(shape, NAN, device=device).to(torch.float8_e4m3fn)
    out_scale = torch.full((shape[0], 1), NAN, device=device)

    add_rms_norm_quantize(x, residual, weight, EPS, out_q, out_scale, starts_stream=starts_stream)

    assert residual.equal(total)
    assert_quantized(out_q, out_scale.flatten(), exact(total, weight))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_quantised_rows(device: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = rows_apart(*shape, dtype, device)
    if shape[0] > 1:
        x[1] = 0.0  # a row without a scale of its own
        x[-1] *= 1000.0
    out_q = torch.full(shape, NAN, device=device).to(torch.float8_e4m3fn)
    out_scale = torch.full(shape[:1], NAN, device=device)
    quantize_rows(x, out_q, out_scale)
    assert_quantized(out_q, out_scale, x)


def test_references_agree_with_float64() -> None:
    x = torch.randn(4, 100).bfloat16()
    stream, weight = torch.randn(4, 100), torch.randn(100)
    out, residual = torch.empty(4, 100), stream.clone()
    add_rms_norm_reference(x, residual, weight, EPS, out)
    assert residual.equal(stream + x)
    torch.testing.assert_close(out.double(), exact(residual, weight), rtol=1e-5, atol=1e-6)

    out_q, out_scale = torch.empty(4, 100, dtype=torch.float8_e4m3fn), torch.empty(4)
    add_rms_norm_quantize_reference(x, stream, weight, EPS, out_q, out_scale)
    assert_quantized(out_q, out_scale, exact(residual, weight))
    quantize_rows_reference(x, out_q, out_scale)
    assert_quantized(out_q, out_scale, x)

    bias, residual = torch.randn(100), stream.clone()
    add_layer_norm_reference(x, residual, weight, bias, EPS, out)
    wanted = exact_layer_norm(stream + x, weight, bias)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
    add_layer_norm_quantize_reference(x, stream, weight, bias, EPS, out_q, out_scale)
    assert_quantized(out_q, out_scale, wanted)


def test_torch_ops(device: str) -> None:
    """By dispatch: the kernel on a GPU, the reference elsewhere; nothing happens while tracing."""
    x = torch.randn(2, 32, device=device).bfloat16()
    residual, weight = torch.randn(2, 32, device=device), torch.randn(32, device=device)
    total, out = residual + x, torch.full((2, 32), NAN, device=device)
    torch.ops.tokenmill.add_rms_norm(x, residual, weight, EPS, out)
    torch.testing.assert_close(out.double(), exact(total, weight), rtol=1e-5, atol=1e-6)
    bias, total = torch.randn(32, device=device), residual + x
    torch.ops.tokenmill.add_layer_norm(x, residual, weight, bias, EPS, out)
    wanted = exact_layer_norm(total, weight, bias)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
    on_meta = [tensor.to("meta") for tensor in (x, residual, weight)]
    torch.ops.tokenmill.add_rms_norm(*on_meta, EPS, out.to("meta"), starts_stream=True)
