"""Float8 products: right in every tile, and with the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.gpu.gemm_config import SplitWorkspace, TileConfig, tiles_of
from tokenmill.kernels.gpu.gemm_fp8 import (
    FP8_TILES,
    dequantize_fp8,
    matmul_fp8,
    matmul_fp8_reference,
    quantize_weight_fp8,
    scaled_mm,
)
from tokenmill.kernels.gpu.row_quantization import quantize_rows

ALL_TILES = tiles_of(FP8_TILES)
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def workspace(device: str) -> SplitWorkspace:
    return SplitWorkspace.allocate(device, num_values=1 << 20, num_tiles=256)


def operands(num_rows: int, num_columns: int, depth: int, device: str) -> Operands:
    """(x, x_scale, weight, weight_scale) with rows and channels of many magnitudes."""
    x = torch.randn(num_rows, depth) * torch.logspace(-3, 3, num_rows)[:, None]
    weight = torch.randn(num_columns, depth) * torch.logspace(-2, 1, num_columns)[:, None]
    codes = torch.empty(num_rows, depth, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(num_rows, device=device)
    quantize_rows(x.bfloat16().to(device), codes, scale)
    return codes, scale, *quantize_weight_fp8(weight.to(device))


def product(
    given: Operands,
    workspace: SplitWorkspace,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    tile: TileConfig | None = None,
    num_segments: int | None = None,
) -> torch.Tensor:
    shape = (len(given[0]), len(given[2]))
    out = torch.full(shape, torch.nan, dtype=out_dtype, device=given[0].device)
    matmul_fp8(*given, bias, out, workspace, tile=tile, num_segments=num_segments)
    assert not workspace.arrivals.any()
    return out


def assert_right(
    out: torch.Tensor, given: Operands, bias: torch.Tensor | None = None, rounding: float = 0.0
) -> None:
    """Within 2 ** -12 of the sum of magnitudes: what is lost where the matrix unit adds."""
    x, x_scale, weight, weight_scale = given
    wanted = torch.empty_like(out, dtype=torch.float64)
    matmul_fp8_reference(*given, bias, wanted)
    magnitude = torch.empty_like(wanted)
    absolute = [dequantize_fp8(x, x_scale).abs(), dequantize_fp8(weight, weight_scale).abs()]
    torch.mm(absolute[0], absolute[1].t(), out=magnitude)
    error = (out.double() - wanted).abs()
    assert (error <= magnitude * 2**-12 + wanted.abs() * rounding).all()


@pytest.mark.parametrize("num_segments", [1, 3])
@pytest.mark.parametrize("tile", ALL_TILES, ids=lambda t: f"{t.block_m}x{t.block_n}")
def test_every_tile(
    tile: TileConfig, num_segments: int, device: str, workspace: SplitWorkspace
) -> None:
    given = operands(tile.block_m + 3, tile.block_n + 5, 304, device)
    out = product(given, workspace, tile=tile, num_segments=num_segments)
    assert_right(out, given)


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "depth"),
    [(0, 16, 32), (3, 0, 32), (1, 1, 1), (5, 70, 200), (17, 33, 130)],
)
def test_odd_shapes(
    num_rows: int, num_columns: int, depth: int, device: str, workspace: SplitWorkspace
) -> None:
    given = operands(num_rows, num_columns, depth, device)
    assert_right(product(given, workspace, num_segments=2), given)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32])
def test_types(
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    device: str,
    workspace: SplitWorkspace,
) -> None:
    given = operands(4, 40, 96, device)
    given[1].fill_(0.01)  # so that the result fits float16
    bias = None if bias_dtype is None else torch.randn(40).to(bias_dtype).to(device)
    out = product(given, workspace, bias=bias, out_dtype=out_dtype)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 0.0}[out_dtype]
    assert_right(out, given, bias, rounding)


def test_a_row_has_the_same_bits_in_every_tile(device: str, workspace: SplitWorkspace) -> None:
    """On a GPU for any values; in the interpreter for integers, whose sums are exact."""
    x, x_scale, weight, weight_scale = operands(130, 70, 384, device)
    if device == "cpu":
        x, weight = (
            torch.randint(-8, 9, tensor.shape).float().to(torch.float8_e4m3fn)
            for tensor in (x, weight)
        )
    wanted = product((x, x_scale, weight, weight_scale), workspace, num_segments=2)
    for num_rows in (1, 7, 20, 40):
        given = (x[:num_rows], x_scale[:num_rows], weight, weight_scale)
        assert torch.equal(product(given, workspace, num_segments=2), wanted[:num_rows])


def test_a_weight_is_quantised_by_channel(device: str) -> None:
    weight = torch.randn(20, 50, device=device) * torch.logspace(-8, 3, 20, device=device)[:, None]
    weight[4] = 0.0
    codes, scale = quantize_weight_fp8(weight.bfloat16())
    assert codes.shape == weight.shape
    assert scale.shape == (20,)
    largest = weight.bfloat16().float().abs().amax(1)
    error = (dequantize_fp8(codes, scale) - weight.bfloat16().double()).abs().amax(1)
    # Half of the distance between codes next to the largest.
    assert (error <= largest.double() * 2**-4 + 1e-12).all()
    others = [i for i in range(20) if i != 4]
    assert (codes[others].float().abs().amax(1) == 448.0).all()
    assert not codes[4].float().any()


@pytest.mark.parametrize("num_rows", [1, 16, 40])
def test_torch_computes_the_same(num_rows: int, device: str, workspace: SplitWorkspace) -> None:
    given = operands(num_rows, 48, 128, device)
    assert_right(scaled_mm(*given), given, rounding=2**-8)


def test_the_table_keeps_one_order_of_sums() -> None:
    for tile in ALL_TILES:
        assert (tile.block_k, tile.most_imprecise, tile.instruction) == (128, 128, "wgmma")


def test_torch_op(device: str, workspace: SplitWorkspace) -> None:
    given = operands(3, 20, 64, device)
    out = torch.full((3, 20), torch.nan, device=device)
    torch.ops.tokenmill.matmul_fp8(*given, None, out, workspace.partial, workspace.arrivals)
    assert_right(out, given)
