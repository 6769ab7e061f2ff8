"""Matrix products with weights as checkpoints have them: x [M, K] @ weight [N, K].T + bias.

    matmul_exact    any M; a row has the same bits for any M and any neighbours

Sums are float32, rounded once, after the bias. Their order is in `gemm_config.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenmill.kernels.gpu.gemm_config import TILES, SplitWorkspace, TileConfig, tiles_of
from tokenmill.kernels.gpu.gemm_tiles import launch_product, product_case
from tokenmill.kernels.gpu.launch import CompileCase, define_op


def matmul_exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    workspace: SplitWorkspace,
    *,
    tile: TileConfig | None = None,
    num_segments: int | None = None,
) -> None:
    """Put x [M, K] @ weight [N, K].T + bias [N] into out [M, N].

    x and weight are bfloat16, float16 or float32 alike; bias and out are any of these. The weight
    is contiguous; rows of x and out may lie apart. A row of out has the same bits whatever M is, as
    long as `tile` (by default chosen by M) has the same instruction and `num_segments` (by default
    chosen by N and K) is the same.
    """
    assert x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    table = TILES["fma" if x.dtype == torch.float32 else "wgmma"]
    launch_product(
        x, weight, out, workspace, table, tile=tile, bias=bias, num_segments=num_segments
    )


def matmul_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """What `matmul_exact` approximates, in float64."""
    product = x.double() @ weight.double().t()
    out.copy_(product if bias is None else product + bias.double())


def _matmul_exact_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    partial: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    matmul_exact(x, weight, bias, out, SplitWorkspace(partial, arrivals))


def _matmul_reference_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    partial: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    matmul_reference(x, weight, bias, out)


define_op(
    "matmul_exact(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, Tensor(b!) partial,"
    " Tensor(c!) arrivals) -> ()",
    cuda=_matmul_exact_op,
    cpu=_matmul_reference_op,
)


def compile_cases() -> list[CompileCase]:
    """Every tile of the tables: a narrow weight in four segments, a wide one in one."""
    tiles = [*tiles_of(TILES["wgmma"]), *tiles_of(TILES["mma"])]
    few, large = tiles[0], tiles_of(TILES["wgmma"])[-2]
    return [
        *(_case(tile, segments) for tile in tiles for segments in (1, 4)),
        _case(replace(few, use_descriptors=False), 4),
        _case(replace(large, use_descriptors=False), 1),
        *(_case(tile, 4, "fp32") for tile in tiles_of(TILES["fma"])),
    ]


def _case(tile: TileConfig, num_segments: int, dtype: str = "bf16") -> CompileCase:
    return product_case("matmul_exact", tile, num_segments, dtype, dtype, scaled=False)
