"""Four-bit weights: packing without loss, and products that are right in every tile."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.gpu.gemm_config import SplitWorkspace, tiles_of
from tokenmill.kernels.gpu.gemm_int4 import (
    INT4_TILES,
    Int4Tile,
    matmul_int4,
    matmul_int4_reference,
)
from tokenmill.kernels.gpu.int4 import (
    GROUP_SIZES,
    PackedInt4,
    int4_codes,
    pack_int4,
    pack_scales,
    quantize_weight_int4,
    unpack_scales,
)

ALL_TILES = tiles_of(INT4_TILES)


@pytest.fixture(scope="module")
def workspace(device: str) -> SplitWorkspace:
    return SplitWorkspace.allocate(device, num_values=1 << 20, num_tiles=256)


def random_parts(
    num_rows: int, depth: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale, minimum) that bfloat16 represents."""
    codes = torch.randint(0, 16, (num_rows, depth), dtype=torch.uint8)
    shape = (num_rows, -(-depth // group_size))
    scale = (torch.rand(shape) / 16 + 0.01).bfloat16().float()
    minimum = (-8 * scale * (0.5 + torch.rand(shape))).bfloat16().float()
    return codes, scale, minimum


def values_of(
    codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, group_size: int
) -> torch.Tensor:
    """What the parts stand for, spelled out one value at a time."""
    group = torch.arange(codes.shape[1]) // group_size
    return (codes.float() * scale[:, group] + minimum[:, group]).to(torch.bfloat16)


def product(
    x: torch.Tensor,
    weight: PackedInt4,
    workspace: SplitWorkspace,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    tile: Int4Tile | None = None,
    num_segments: int | None = None,
) -> torch.Tensor:
    shape = (len(x), weight.out_features)
    out = torch.full(shape, torch.nan, dtype=out_dtype, device=x.device)
    matmul_int4(x, weight, bias, out, workspace, tile=tile, num_segments=num_segments)
    assert not workspace.arrivals.any()
    return out


def assert_right(out: torch.Tensor, x: torch.Tensor, weight: PackedInt4) -> None:
    wanted = torch.empty_like(out, dtype=torch.float64)
    matmul_int4_reference(x, weight, None, wanted)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("depth", [128, 256, 200, 33])
def test_packing_keeps_every_value(depth: int, group_size: int, device: str) -> None:
    parts = random_parts(20, depth, group_size)
    packed = pack_int4(*(part.to(device) for part in parts), group_size)
    ids = torch.tensor([19, 0, 7, 7], device=device)
    unpacked = packed.unpack_rows(ids)
    assert torch.equal(unpacked.cpu(), values_of(*parts, group_size)[ids.cpu()])
    assert packed.codes.nbytes * 2 == 20 * packed.scales.shape[0] * group_size


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_rows_are_packed_in_parts(group_size: int, device: str) -> None:
    parts = random_parts(20, 160, group_size)
    packed = PackedInt4.empty(20, 160, group_size, device)
    packed.codes.fill_(255)
    for rows in (slice(7, 20), slice(0, 7)):
        packed.pack_rows(rows, *(part[rows] for part in parts))
    whole = pack_int4(*parts, group_size)
    assert torch.equal(packed.codes.cpu(), whole.codes)
    assert torch.equal(packed.scales.cpu(), whole.scales)


def test_scales_survive_their_packing() -> None:
    scale = torch.tensor([[1.5, -2.0, 0.0], [1e-20, 3e5, 0.01171875]])
    minimum = torch.tensor([[-0.5, 7.0, -0.0], [1e20, -3e-5, -1.0]]).bfloat16().float()
    scale = scale.bfloat16().float()
    for found, wanted in zip(
        unpack_scales(pack_scales(scale, minimum)), (scale, minimum), strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("depth", [256, 200])
def test_quantising_is_to_the_nearest_code(depth: int, group_size: int) -> None:
    weight = torch.randn(12, depth) * torch.logspace(-3, 2, 12)[:, None]
    weight[5] = 0.25  # no range at all
    codes, scale, minimum = int4_codes(weight.bfloat16(), group_size)
    assert codes.max() == 15
    group = torch.arange(depth) // group_size
    approximate = codes.float() * scale[:, group] + minimum[:, group]
    error = (approximate - weight.bfloat16().float()).abs()
    # Half a step, and what rounding scale and minimum to eight bits moves the ends of the range.
    largest = weight.abs().amax(1, keepdim=True)
    assert (error <= scale[:, group] / 2 + largest * 2**-7).all()
    assert torch.equal(approximate[5], torch.full((depth,), 0.25))
    packed = quantize_weight_int4(weight.bfloat16(), group_size)
    ids = torch.arange(12)
    torch.testing.assert_close(packed.unpack_rows(ids).float(), approximate, rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("num_segments", [1, 3])
@pytest.mark.parametrize("tile", ALL_TILES, ids=lambda t: f"{t.block_m}x{t.block_n}")
def test_every_tile(
    tile: Int4Tile, num_segments: int, group_size: int, device: str, workspace: SplitWorkspace
) -> None:
    x = (torch.randn(tile.block_m + 3, 320) / 4).bfloat16().to(device)
    parts = random_parts(tile.block_n + 5, 320, group_size)
    weight = pack_int4(*(part.to(device) for part in parts), group_size)
    assert_right(product(x, weight, workspace, tile=tile, num_segments=num_segments), x, weight)


@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "depth"),
    [(0, 16, 128), (3, 0, 128), (1, 1, 1), (5, 70, 200), (17, 33, 130)],
)
def test_odd_shapes(
    num_rows: int,
    num_columns: int,
    depth: int,
    group_size: int,
    device: str,
    workspace: SplitWorkspace,
) -> None:
    # What lies behind a row is another row's, and must not be multiplied with the padding.
    x = torch.full((num_rows + 1, depth), torch.nan, device=device).bfloat16()[:num_rows]
    x.copy_(torch.randn(num_rows, depth))
    weight = pack_int4(
        *(part.to(device) for part in random_parts(num_columns, depth, group_size)), group_size
    )
    assert_right(product(x, weight, workspace, num_segments=2), x, weight)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32])
def test_types(
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    device: str,
    workspace: SplitWorkspace,
) -> None:
    wide = torch.randn(4, 300).bfloat16().to(device)
    x = wide[:, 16:144]
    weight = pack_int4(*(part.to(device) for part in random_parts(40, 128, 64)), 64)
    bias = None if bias_dtype is None else torch.randn(40).to(bias_dtype).to(device)
    out = product(x, weight, workspace, bias=bias, out_dtype=out_dtype)
    wanted = torch.empty_like(out, dtype=torch.float64)
    matmul_int4_reference(x, weight, bias, wanted)
    tolerance = 2.0 ** {torch.bfloat16: -8, torch.float16: -11, torch.float32: -18}[out_dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=1e-4)


def test_a_row_has_the_same_bits_in_every_tile(device: str, workspace: SplitWorkspace) -> None:
    """On a GPU for any values; in the interpreter for such as have exact sums."""
    codes, scale, minimum = random_parts(70, 384, 64)
    x = torch.randn(130, 384).bfloat16().to(device)
    if device == "cpu":
        x, scale, minimum = (x * 4).round(), torch.ones_like(scale), minimum.round()
    weight = pack_int4(codes.to(device), scale.to(device), minimum.to(device), 64)
    wanted = product(x, weight, workspace, num_segments=2)
    for num_rows in (1, 7, 20, 40):
        part = product(x[:num_rows], weight, workspace, num_segments=2)
        assert torch.equal(part, wanted[:num_rows])


def test_the_table_keeps_one_instruction() -> None:
    for tile in ALL_TILES:
        assert tile.block_n >= 64
        assert tile.num_warps % 4 == 0


def test_torch_op(device: str, workspace: SplitWorkspace) -> None:
    x = torch.randn(3, 128).bfloat16().to(device)
    weight = pack_int4(*(part.to(device) for part in random_parts(20, 128, 32)), 32)
    out = torch.full((3, 20), torch.nan, device=device)
    torch.ops.tokenmill.matmul_int4(
        x, weight.codes, weight.scales, None, out, workspace.partial, workspace.arrivals, 32
    )
    assert_right(out, x, weight)
