"""Products with few rows, fused with a norm, a gated activation and the residual addition."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tokenmill.kernels.gpu.gemm_config import SplitWorkspace
from tokenmill.kernels.gpu.gemm_small import (
    FEW_ROWS,
    ONE_ROW,
    linear_small,
    linear_small_reference,
)

ROWS = [0, 1, pytest.param(2, marks=pytest.mark.slow), 3, 16]
SHAPES = [(64, 128), (5, 40), (70, 1030), (130, 1152)]
"""[N, K]; the last two are cut into segments where several rows are multiplied."""


@pytest.fixture(scope="module")
def workspace(device: str) -> SplitWorkspace:
    return SplitWorkspace.allocate(device, num_values=1 << 20, num_tiles=256)


def values(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(device)


def check(
    x: torch.Tensor, weight: torch.Tensor, workspace: SplitWorkspace, tolerance: float, **how: Any
) -> None:
    shape = (len(x), len(weight))
    if how.get("accumulates"):
        out = values(*shape, device=x.device.type, dtype=torch.float32)
    else:
        out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=x.device)
        tolerance += 2**-8  # the result's rounding
    wanted = out.double()
    linear_small_reference(x, weight, wanted, **how)
    workspace.partial.fill_(torch.nan)
    linear_small(x, weight, out, workspace, **how)
    assert not workspace.arrivals.any()
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_the_product(
    num_rows: int, shape: tuple[int, int], accumulates: bool, device: str, workspace: SplitWorkspace
) -> None:
    x, weight = values(num_rows, shape[1], device=device), values(*shape, device=device)
    check(x, weight / 8, workspace, 1e-4, accumulates=accumulates)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_behind_a_norm(
    num_rows: int, shape: tuple[int, int], accumulates: bool, device: str, workspace: SplitWorkspace
) -> None:
    weight = values(*shape, device=device) / shape[1] ** 0.5
    x = values(num_rows, shape[1], device=device, dtype=torch.float32) * 30
    x[num_rows // 2 :] = 0.0  # only eps keeps such a row finite
    norm_weight = values(shape[1], device=device, dtype=torch.float32)
    # Several rows are rounded to bfloat16 on their way to the matrix unit.
    tolerance = 1e-4 if num_rows == 1 else 2**-6
    check(
        x, weight, workspace, tolerance,
        norm_weight=norm_weight, eps=1e-5, accumulates=accumulates,
    )  # fmt: skip


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_behind_a_gated_activation(
    num_rows: int, shape: tuple[int, int], accumulates: bool, device: str, workspace: SplitWorkspace
) -> None:
    weight = values(*shape, device=device) / shape[1] ** 0.5
    x = values(num_rows, 2 * shape[1], device=device)
    tolerance = 1e-4 if num_rows == 1 else 2**-6
    check(x, weight, workspace, tolerance, gated=True, accumulates=accumulates)


@pytest.mark.parametrize("how", ["nothing", "norm", "gated"])
def test_a_row_has_the_same_bits_among_others(
    how: str, device: str, workspace: SplitWorkspace
) -> None:
    depth = 1152
    weight = values(70, depth, device=device)
    x = values(16, depth, device=device)
    options: dict[str, Any] = {}
    if how == "norm":
        x = x.float()
        norm_weight = values(depth, device=device, dtype=torch.float32)
        options = {"norm_weight": norm_weight, "eps": 1e-6}
    elif how == "gated":
        x = values(16, 2 * depth, device=device)
        options = {"gated": True}

    def product(rows: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(rows), 70), torch.nan, device=device)
        linear_small(rows, weight, out, workspace, **options)
        return out

    together = product(x)
    assert torch.equal(product(x[3:5]), together[3:5])
    assert torch.equal(product(x[3:14]), together[3:14])
    assert torch.equal(product(x[5:6]), product(x[5:6].clone()))


@pytest.mark.parametrize(
    ("num_rows", "config"),
    [
        (1, replace(ONE_ROW, block_n=8, block_k=512)),
        (1, replace(ONE_ROW, block_n=1, block_k=2048)),
        (5, replace(FEW_ROWS, block_n=128, block_k=64)),
        (5, replace(FEW_ROWS, block_n=32)),
    ],
    ids=str,
)
def test_other_tiles(num_rows: int, config: Any, device: str, workspace: SplitWorkspace) -> None:
    x, weight = values(num_rows, 1152, device=device), values(70, 1152, device=device) / 8
    out = torch.full((num_rows, 70), torch.nan, device=device)
    linear_small(x, weight, out, workspace, config=config)
    wanted = torch.empty_like(out, dtype=torch.float64)
    linear_small_reference(x, weight, wanted)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 7])
def test_a_launch_that_depends_on_the_one_in_front(
    num_rows: int, device: str, workspace: SplitWorkspace
) -> None:
    """A chain of products, each of which reads what the one in front of it writes."""
    weight = values(512, 512, device=device) / 512**0.5
    results = []
    for dependent_launch in (False, True):
        buffers = [torch.zeros(num_rows, 512, device=device).bfloat16() for _ in range(4)]
        buffers[0].fill_(1.0)
        for x, out in pairwise(buffers):
            linear_small(x, weight, out, workspace, dependent_launch=dependent_launch)
        results.append(buffers[-1].clone())
    assert results[0].any()
    assert torch.equal(*results)


def test_torch_op(device: str, workspace: SplitWorkspace) -> None:
    x = values(3, 64, device=device, dtype=torch.float32)
    weight = values(20, 64, device=device) / 8
    norm_weight = values(64, device=device, dtype=torch.float32)
    outs = [torch.ones(3, 20, device=device) for _ in range(2)]
    how = {"norm_weight": norm_weight, "eps": 1e-5, "accumulates": True}
    shared = (workspace.partial, workspace.arrivals)
    torch.ops.tokenmill.linear_small(x, weight, outs[0], *shared, **how)
    linear_small_reference(x, weight, outs[1], **how)
    torch.testing.assert_close(*outs, rtol=2**-6, atol=2**-6)
