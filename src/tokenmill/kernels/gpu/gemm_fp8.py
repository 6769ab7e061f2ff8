"""Products of float8 e4m3 weights and activations, eight bits each, with float32 scales.

    weight = codes [N, K] * scale [N]     one scale an output channel
    x      = codes [M, K] * scale [M]     one scale a row, as `quantize_rows` makes it

Half the bytes of 16-bit weights where few rows are multiplied, twice the matrix unit's rate where
many are. The unit adds e4m3 products with about 14 bits, so every 128 of them are added to a
float32 sum.
"""

from __future__ import annotations

import torch

from tokenmill.kernels.gpu.gemm_config import (
    ANY_ROWS,
    EARLY_BYTES,
    HALF_WAVE,
    TWO_WAVES,
    Choice,
    SplitWorkspace,
    Table,
    TileConfig,
    tiles_of,
)
from tokenmill.kernels.gpu.gemm_tiles import launch_product, product_case
from tokenmill.kernels.gpu.launch import CompileCase, define_op
from tokenmill.kernels.gpu.row_quantization import quantize_rows_reference


def _few(block_m: int, block_n: int, warps: int, stages: int) -> TileConfig:
    return TileConfig(
        block_m, block_n, 128, warps, stages, True, True, most_imprecise=128,
        early_bytes=EARLY_BYTES if block_m <= 64 else 0,
    )  # fmt: skip


FP8_TILES: Table[TileConfig] = (
    (16, (Choice(_few(16, 64, 4, 8), 0),)),
    (32, (Choice(_few(32, 64, 4, 6), 0),)),
    (64, (Choice(_few(64, 128, 4, 4), TWO_WAVES), Choice(_few(64, 64, 4, 6), 0))),
    (128, (Choice(_few(128, 128, 8, 3), TWO_WAVES), Choice(_few(128, 64, 4, 4), 0))),
    (
        ANY_ROWS,
        (
            Choice(TileConfig(128, 128, 128, 8, 3, False, False, most_imprecise=128), HALF_WAVE),
            Choice(_few(128, 128, 8, 3), 0),
        ),
    ),
)
"""All step by 128 along K: where a sum goes to float32 is part of its order."""


def matmul_fp8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    workspace: SplitWorkspace,
    *,
    tile: TileConfig | None = None,
    num_segments: int | None = None,
) -> None:
    """Put (x @ weight.T) * x_scale * weight_scale + bias into out [M, N].

    x [M, K] and weight [N, K] are float8_e4m3fn, x_scale (M elements) and weight_scale [N] float32,
    bias [N] and out bfloat16, float16 or float32. The weight is contiguous; rows of x and out may
    lie apart. A row of out has the same bits whatever M is.
    """
    assert x.dtype == torch.float8_e4m3fn
    launch_product(
        x,
        weight,
        out,
        workspace,
        FP8_TILES,
        tile=tile,
        x_scale=x_scale,
        weight_scale=weight_scale,
        bias=bias,
        num_segments=num_segments,
    )


def scaled_mm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
) -> torch.Tensor:
    """What `matmul_fp8` computes, bfloat16 [M, N], by torch; its rows may depend on M.

    For a GPU of compute capability 8.9 or more; N and K are multiples of 16.
    """
    result: torch.Tensor = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scale.view(-1, 1),
        scale_b=weight_scale.view(1, -1),
        out_dtype=torch.bfloat16,
    )
    return result


def matmul_fp8_reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """What `matmul_fp8` approximates, in float64."""
    product = dequantize_fp8(x, x_scale.view(-1)) @ dequantize_fp8(weight, weight_scale).t()
    out.copy_(product if bias is None else product + bias.double())


def quantize_weight_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes float8_e4m3fn [N, K], scale float32 [N]) of a weight [N, K] of any float type.

    The largest magnitude of an output channel becomes the largest code, 448.
    """
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    quantize_rows_reference(weight, codes, scale)
    return codes, scale


def dequantize_fp8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What codes [N, K] and scale [N] stand for, float64."""
    return codes.to(torch.float32).double() * scale.double()[:, None]


def _matmul_fp8_op(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    partial: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    workspace = SplitWorkspace(partial, arrivals)
    matmul_fp8(x, x_scale, weight, weight_scale, bias, out, workspace)


def _matmul_fp8_reference_op(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    partial: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    matmul_fp8_reference(x, x_scale, weight, weight_scale, bias, out)


define_op(
    "matmul_fp8(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias,"
    " Tensor(a!) out, Tensor(b!) partial, Tensor(c!) arrivals) -> ()",
    cuda=_matmul_fp8_op,
    cpu=_matmul_fp8_reference_op,
)


def compile_cases() -> list[CompileCase]:
    """Every tile, for a narrow weight in four segments and a wide one in one."""
    return [
        product_case("matmul_fp8", tile, num_segments, "fp8e4nv", "bf16", scaled=True)
        for tile in tiles_of(FP8_TILES)
        for num_segments in (1, 4)
    ]
