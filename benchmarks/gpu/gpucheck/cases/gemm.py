"""Products with the weights of an 8-billion-parameter Llama, beside cuBLAS; fused ones, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from gpucheck.cases import lora
from gpucheck.cases.case import MANY_ROUNDED, ROUNDED, Case, Place, Result

WEIGHTS = {"qkv": (6_144, 4_096), "o": (4_096, 4_096), "gate up": (28_672, 4_096),
           "down": (4_096, 14_336), "head": (128_256, 4_096)}  # fmt: skip
SMALL_WEIGHTS = {"even": (64, 256), "odd": (40, 72)}
FP8 = torch.float8_e4m3fn
NUMS_ROWS = [1, 8, 64, 256, 4_096]
FUSED = [
    ("qkv", "norm", False),
    ("o", "", True),
    ("gate up", "norm", False),
    ("down", "silu", True),
    ("head", "", False),
]
"""A layer's products: what stands in front, and whether the result is added to the residual."""


def cases(place: Place) -> Iterator[Case]:
    for name, (num_columns, depth) in (SMALL_WEIGHTS if place.small else WEIGHTS).items():
        for num_rows in place.pick(NUMS_ROWS, [3]):
            if name != "head" or num_rows <= 256:
                yield _matmul_exact(place, name, num_rows, num_columns, depth)
    for name in place.pick(["gate up", "down"], ["even"]):
        for num_rows in place.pick([1, 64, 256, 4_096], [3]):
            weight = SMALL_WEIGHTS[name] if place.small else WEIGHTS[name]
            yield _matmul_fp8(place, name, num_rows, *weight)
    for num_rows in place.pick([1, 8, 16], [1, 3]):
        for name, before, accumulates in FUSED:
            weight = (32, 256) if place.small else WEIGHTS[name]
            yield _linear_small(place, name, num_rows, weight, before, accumulates=accumulates)
    for name in place.pick(["gate up", "down"], ["even", "odd"]):
        for num_rows in place.pick([1, 64, 256, 4_096], [3]):
            for group_size in place.pick([32, 128], [32, 64, 128]):
                weight = SMALL_WEIGHTS[name] if place.small else WEIGHTS[name]
                yield _matmul_int4(place, name, num_rows, *weight, group_size)
    yield from lora.cases(place)


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


def _matmul_fp8(place: Place, name: str, num_rows: int, num_columns: int, depth: int) -> Case:
    from tokenmill.kernels.gpu.gemm_config import SplitWorkspace
    from tokenmill.kernels.gpu.gemm_fp8 import matmul_fp8, matmul_fp8_reference, scaled_mm

    x = place.randn(num_rows, depth).to(FP8)
    weights = [place.randn(num_columns, depth).to(FP8) for _ in place.sets(num_columns * depth)]
    scales = [place.randn(count, dtype=torch.float32).abs() for count in (num_rows, num_columns)]
    out = place.poisoned(num_rows, num_columns)
    workspace = SplitWorkspace.allocate(place.device)

    def launch(i: int) -> None:
        weight = weights[i % len(weights)]
        matmul_fp8(x, scales[0], weight, scales[1], None, out, workspace)

    def results() -> Iterator[Result]:
        expected = torch.empty_like(out, dtype=torch.float64)
        matmul_fp8_reference(x, scales[0], weights[0], scales[1], None, expected)
        yield out, expected, MANY_ROUNDED

    return Case(
        "matmul_fp8",
        f"{name}, {num_rows} x {num_columns} x {depth}",
        launch,
        results,
        num_bytes=num_rows * depth + num_columns * depth + out.nbytes,
        num_flops=2 * num_rows * num_columns * depth,
        matmul_speed=2.0,
        other=lambda i: scaled_mm(x, scales[0], weights[i % len(weights)], scales[1]),
        other_name="cuBLAS ms",
    )


def _matmul_int4(
    place: Place, name: str, num_rows: int, num_columns: int, depth: int, group_size: int
) -> Case:
    from tokenmill.kernels.gpu.gemm_config import SplitWorkspace
    from tokenmill.kernels.gpu.gemm_int4 import matmul_int4
    from tokenmill.kernels.gpu.int4 import pack_int4

    x = place.randn(num_rows, depth)
    codes = place.integers(16, num_columns, depth, dtype=torch.uint8)
    shape = (num_columns, -(-depth // group_size))
    scale = place.randn(*shape, scale=depth**-0.5 / 8)
    minimum = -8 * scale + place.randn(*shape, scale=depth**-0.5 / 8)
    packed = pack_int4(codes, scale, minimum, group_size)
    num_bytes = packed.codes.nbytes + packed.scales.nbytes
    weights = [
        replace(packed, codes=packed.codes.clone(), scales=packed.scales.clone())
        for _ in place.sets(num_bytes)
    ]
    repeated = [s.repeat_interleave(group_size, 1)[:, :depth].double() for s in (scale, minimum)]
    plain = (codes * repeated[0] + repeated[1]).bfloat16()
    del repeated
    out = place.poisoned(num_rows, num_columns)
    workspace = SplitWorkspace.allocate(place.device)

    return Case(
        "matmul_int4",
        f"{name}, groups of {group_size}, {num_rows} x {num_columns} x {depth}",
        lambda i: matmul_int4(x, weights[i % len(weights)], None, out, workspace),
        lambda: [(out, x.double() @ plain.double().t(), ROUNDED)],
        num_bytes=num_bytes + x.nbytes + out.nbytes,
        num_flops=2 * num_rows * num_columns * depth,
        other=lambda i: torch.mm(x, plain.t()),
        other_name="cuBLAS bf16 ms",
    )


def _linear_small(
    place: Place,
    name: str,
    num_rows: int,
    weight_shape: tuple[int, int],
    before: str,
    *,
    accumulates: bool,
) -> Case:
    from tokenmill.kernels.gpu.gemm_config import SplitWorkspace
    from tokenmill.kernels.gpu.gemm_small import linear_small, linear_small_reference

    num_columns, depth = weight_shape
    weights = [
        place.randn(num_columns, depth, scale=depth**-0.5)
        for _ in place.sets(num_columns * depth * 2)
    ]
    x_type = torch.float32 if before == "norm" else torch.bfloat16
    x = place.randn(num_rows, 2 * depth if before == "silu" else depth, dtype=x_type)
    out = place.poisoned(num_rows, num_columns)
    if accumulates:
        out = place.randn(num_rows, num_columns, dtype=torch.float32)
    expected = out.double()
    workspace = SplitWorkspace.allocate(place.device)
    options: dict[str, Any] = {"accumulates": accumulates, "gated": before == "silu"}
    if before == "norm":
        options |= {"norm_weight": place.randn(depth, dtype=torch.float32), "eps": 1e-5}

    plain = x[:, :depth].bfloat16()

    def launch(i: int) -> None:
        linear_small(x, weights[i % len(weights)], out, workspace, **options)

    def results() -> Iterator[Result]:
        linear_small_reference(x, weights[0], expected, **options)
        yield out, expected, MANY_ROUNDED if before else ROUNDED

    parts = [before and f"{before} in front", accumulates and "added to the residual"]
    return Case(
        "linear_small",
        ", ".join(
            [name, *(part for part in parts if part), f"{num_rows} x {num_columns} x {depth}"]
        ),
        launch,
        results,
        num_bytes=2 * num_columns * depth,
        num_flops=2 * num_rows * num_columns * depth,
        other=lambda i: torch.mm(plain, weights[i % len(weights)].t()),
        other_name="cuBLAS ms",
    )
