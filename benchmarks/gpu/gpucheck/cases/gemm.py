"""Matrix products with the weights of an 8-billion-parameter Llama, beside cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpucheck.cases.case import ROUNDED, Case, Place

WEIGHTS = {"qkv": (6_144, 4_096), "o": (4_096, 4_096), "gate up": (28_672, 4_096),
           "down": (4_096, 14_336), "head": (128_256, 4_096)}  # fmt: skip
SMALL_WEIGHTS = {"even": (64, 256), "odd": (40, 72)}
NUMS_ROWS = [1, 8, 64, 256, 4_096]


def cases(place: Place) -> Iterator[Case]:
    for name, (num_columns, depth) in (SMALL_WEIGHTS if place.small else WEIGHTS).items():
        for num_rows in place.pick(NUMS_ROWS, [3]):
            if name != "head" or num_rows <= 256:
                yield _matmul_exact(place, name, num_rows, num_columns, depth)


def _matmul_exact(place: Place, name: str, num_rows: int, num_columns: int, depth: int) -> Case:
    from tokenmill.kernels.gpu.gemm_bf16 import matmul_exact
    from tokenmill.kernels.gpu.gemm_config import SplitWorkspace

    weights = [
        place.randn(num_columns, depth, scale=depth**-0.5)
        for _ in place.sets(num_columns * depth * 2)
    ]
    x = place.randn(num_rows, depth)
    out_type = torch.float32 if name == "head" else torch.bfloat16
    out = place.poisoned(num_rows, num_columns, dtype=out_type)
    workspace = SplitWorkspace.allocate(place.device)

    def launch(i: int) -> None:
        matmul_exact(x, weights[i % len(weights)], None, out, workspace)

    def results() -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        return [(out, x.double() @ weights[0].double().t(), ROUNDED)]

    return Case(
        "matmul_exact",
        f"{name}, {num_rows} x {num_columns} x {depth}",
        launch,
        results,
        num_bytes=2 * (num_rows * depth + num_columns * depth) + out.nbytes,
        num_flops=2 * num_rows * num_columns * depth,
        other=lambda i: torch.mm(x, weights[i % len(weights)].t()),
        other_name="cuBLAS ms",
    )
