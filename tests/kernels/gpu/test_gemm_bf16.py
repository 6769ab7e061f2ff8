"""The exact product: right in every tile, and with the same bits for any number of rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tokenmill.kernels.gpu.gemm_bf16 import matmul_exact, matmul_reference
from tokenmill.kernels.gpu.gemm_config import (
    TILES,
    Instruction,
    SplitWorkspace,
    TileConfig,
    choose_segments,
    choose_tile,
    segment_depth,
    tiles_of,
)

WGMMA_TILES = tiles_of(TILES["wgmma"])
ALL_TILES = [*WGMMA_TILES, *tiles_of(TILES["mma"])]
SMALL = TileConfig(16, 64, 64, 4, 3, weight_first=True, segments_in_grid=True)


def tile_id(tile: TileConfig) -> str:
    return f"{tile.block_m}x{tile.block_n}x{tile.block_k}-{tile.instruction}"


@pytest.fixture(scope="module")
def workspace(device: str) -> SplitWorkspace:
    return SplitWorkspace.allocate(device, num_values=1 << 20, num_tiles=256)


def values(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape) / 4).to(dtype).to(device)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: SplitWorkspace,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    tile: TileConfig | None = None,
    num_segments: int | None = None,
) -> torch.Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, dtype=out_dtype, device=x.device)
    matmul_exact(x, weight, bias, out, workspace, tile=tile, num_segments=num_segments)
    assert not workspace.arrivals.any()
    return out


def expected(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, dtype=dtype, device=x.device)
    matmul_reference(x, weight, bias, out)
    return out


@pytest.mark.parametrize("num_segments", [1, 3])
@pytest.mark.parametrize("tile", ALL_TILES, ids=tile_id)
def test_every_tile(
    tile: TileConfig, num_segments: int, device: str, workspace: SplitWorkspace
) -> None:
    x = values(tile.block_m + 3, 328, device=device)
    weight = values(tile.block_n + 5, 328, device=device)
    out = product(x, weight, workspace, tile=tile, num_segments=num_segments)
    torch.testing.assert_close(out.double(), expected(x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("use_descriptors", [True, False])
@pytest.mark.parametrize("weight_first", [True, False])
@pytest.mark.parametrize("in_grid", [True, False])
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "depth"),
    [(1, 1, 1), (1, 65, 64), (7, 64, 72), (16, 130, 256), (17, 63, 190), (40, 70, 136)],
)
def test_odd_shapes(
    num_rows: int,
    num_columns: int,
    depth: int,
    in_grid: bool,
    weight_first: bool,
    use_descriptors: bool,
    device: str,
    workspace: SplitWorkspace,
) -> None:
    tile = replace(
        SMALL,
        segments_in_grid=in_grid,
        weight_first=weight_first,
        use_descriptors=use_descriptors,
        group_m=2,
    )
    x, weight = values(num_rows, depth, device=device), values(num_columns, depth, device=device)
    out = product(x, weight, workspace, tile=tile, num_segments=2)
    torch.testing.assert_close(out.double(), expected(x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32])
def test_types(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    device: str,
    workspace: SplitWorkspace,
) -> None:
    x, weight = (values(n, 64, device=device, dtype=dtype) for n in (5, 48))
    bias = None if bias_dtype is None else values(48, device=device, dtype=bias_dtype)
    out = product(x, weight, workspace, bias=bias, out_dtype=out_dtype)
    wanted = expected(x, weight, bias)
    # Half a unit in the last place of the rounded result, and the float32 sum's own error.
    tolerance = 2.0 ** {torch.bfloat16: -8, torch.float16: -11, torch.float32: -20}[out_dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=1e-5)


def test_rows_of_wider_tensors(device: str, workspace: SplitWorkspace) -> None:
    wide = values(6, 200, device=device)
    weight = values(40, 64, device=device)
    target = torch.full((6, 100), torch.nan, device=device)
    for use_descriptors in (True, False):
        tile = replace(SMALL, use_descriptors=use_descriptors)
        # 4 values from the start: not aligned, so the copy engine cannot be used.
        for start in (0, 4, 8):
            x = wide[:, start : start + 64]
            matmul_exact(x, weight, None, target[:, 20:60], workspace, tile=tile)
            torch.testing.assert_close(
                target[:, 20:60].double(), expected(x, weight), rtol=1e-5, atol=1e-4
            )
    assert target[:, :20].isnan().all()
    assert target[:, 60:].isnan().all()


@pytest.mark.parametrize("tile", tiles_of(TILES["fma"]), ids=tile_id)
def test_float32(tile: TileConfig, device: str, workspace: SplitWorkspace) -> None:
    x, weight = (values(n, 200, device=device, dtype=torch.float32) for n in (70, 66))
    out = product(x, weight, workspace, tile=tile, num_segments=2)
    torch.testing.assert_close(out.double(), expected(x, weight), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("num_rows", "num_columns"), [(0, 16), (4, 0)])
def test_nothing(num_rows: int, num_columns: int, device: str, workspace: SplitWorkspace) -> None:
    x, weight = values(num_rows, 64, device=device), values(num_columns, 64, device=device)
    assert product(x, weight, workspace).shape == (num_rows, num_columns)


def test_a_neighbours_nan_stays_in_its_row(device: str, workspace: SplitWorkspace) -> None:
    x, weight = values(20, 256, device=device), values(70, 256, device=device)
    alone = product(x, weight, workspace, tile=SMALL, num_segments=2)
    x[3] = torch.nan
    weight[7] = torch.inf
    with np.errstate(invalid="ignore"):  # numpy is the interpreter's arithmetic
        out = product(x, weight, workspace, tile=SMALL, num_segments=2)
    assert out[3].isnan().all()
    rows, columns = [r for r in range(20) if r != 3], [c for c in range(70) if c != 7]
    assert torch.equal(out[rows][:, columns], alone[rows][:, columns])


@pytest.mark.parametrize("tile", ALL_TILES, ids=tile_id)
def test_a_row_has_the_same_bits_alone(
    tile: TileConfig, device: str, workspace: SplitWorkspace
) -> None:
    """In one tile, whatever the tile's other rows are."""
    x, weight = values(2 * tile.block_m, 256, device=device), values(64, 256, device=device)
    together = product(x, weight, workspace, tile=tile, num_segments=2)
    for row in (0, 5, tile.block_m + 1):
        alone = product(x[row : row + 1], weight, workspace, tile=tile, num_segments=2)
        assert torch.equal(alone[0], together[row])


def test_a_row_has_the_same_bits_in_every_tile(device: str, workspace: SplitWorkspace) -> None:
    """On a GPU for any values. The interpreter's sums are numpy's, which have an order of their
    own for each shape: there for integers, whose sums are exact in any order.
    """
    x, weight = values(130, 512, device=device), values(70, 512, device=device)
    if device == "cpu":
        x, weight = (x * 8).round(), (weight * 8).round()
    outputs = [
        product(x[:num_rows], weight, workspace, num_segments=2)[:1] for num_rows in (1, 20, 130)
    ]
    outputs += [
        product(x[:3], weight, workspace, tile=tile, num_segments=2)[:1] for tile in WGMMA_TILES
    ]
    for out in outputs[1:]:
        assert torch.equal(out, outputs[0])


def test_segments_in_registers_are_added_as_those_in_memory(
    device: str, workspace: SplitWorkspace
) -> None:
    """Whoever adds them, and also where the last is shorter than a step."""
    for depth in (256, 384, 300, 520):
        x, weight = values(20, depth, device=device), values(70, depth, device=device)
        tiles = [replace(SMALL, block_k=128, segments_in_grid=in_grid) for in_grid in (True, False)]
        outs = [product(x, weight, workspace, tile=tile, num_segments=3) for tile in tiles]
        assert torch.equal(*outs)


def test_many_calls_on_one_workspace(device: str, workspace: SplitWorkspace) -> None:
    """Each leaves the counts as it found them."""
    weight = values(70, 384, device=device)
    for num_rows in (3, 20, 1, 33):
        x = values(num_rows, 384, device=device)
        workspace.partial.fill_(torch.nan)
        out = product(x, weight, workspace, tile=SMALL, num_segments=3)
        torch.testing.assert_close(out.double(), expected(x, weight), rtol=1e-5, atol=1e-4)


def test_segments_cover_the_depth_once() -> None:
    for depth in (8, 128, 136, 576, 2048, 4096, 14336):
        for wanted in (1, 2, 3, 4, 8):
            per_segment = segment_depth(depth, wanted)
            num_segments = -(-depth // per_segment)
            assert per_segment % 128 == 0
            assert num_segments <= wanted
            assert (num_segments - 1) * per_segment < depth <= num_segments * per_segment


def test_segments_depend_on_the_weight_alone_and_fill_the_card() -> None:
    assert choose_segments(128256, 4096) == 1
    assert choose_segments(28672, 4096) == 1
    assert choose_segments(4096, 4096) * 64 >= 128
    assert choose_segments(2048, 8192) * 32 >= 128
    assert choose_segments(576, 576) == 1


SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (3072, 2048), (1536, 8192)]
MANY_ROWS = [1, 16, 17, 64, 65, 128, 129, 256, 300, 512, 1024, 8192]


@pytest.mark.parametrize("instruction", ["wgmma", "mma"])
def test_a_table_has_one_instruction(instruction: Instruction) -> None:
    for num_rows in MANY_ROWS:
        for num_columns, depth in SHAPES:
            segments = choose_segments(num_columns, depth)
            tile = choose_tile(num_rows, num_columns, segments, instruction)
            assert tile.instruction == instruction
            assert tile in tiles_of(TILES[instruction])


def test_a_narrow_product_has_smaller_tiles() -> None:
    assert choose_tile(64, 28672, 1).block_n > choose_tile(64, 4096, 2).block_n
    assert choose_tile(8192, 4096, 2).block_m > choose_tile(512, 4096, 2).block_m
    # So few tiles that each segment gets a program of its own.
    assert choose_tile(256, 2048, 4).segments_in_grid
    assert not choose_tile(8192, 2048, 4).segments_in_grid


def test_the_workspace_holds_what_the_tables_choose() -> None:
    workspace = SplitWorkspace.allocate("meta")
    for num_rows in (*range(1, 130, 8), *range(130, 5000, 61)):
        for num_columns in (*range(64, 9000, 192), 28672, 128256):
            for depth in (512, 4096, 16384):
                segments = choose_segments(num_columns, depth)
                tile = choose_tile(num_rows, num_columns, segments)
                if tile.segments_in_grid and segments > 1:
                    tiles = -(-num_rows // tile.block_m) * -(-num_columns // tile.block_n)
                    assert workspace.holds(tiles, segments, tile.block_m * tile.block_n)


def test_torch_op(device: str, workspace: SplitWorkspace) -> None:
    x, weight, bias = (values(*s, device=device) for s in ((3, 64), (20, 64), (20,)))
    out = torch.full((3, 20), torch.nan, device=device)
    torch.ops.tokenmill.matmul_exact(x, weight, bias, out, workspace.partial, workspace.arrivals)
    torch.testing.assert_close(out.double(), expected(x, weight, bias), rtol=1e-5, atol=1e-4)
