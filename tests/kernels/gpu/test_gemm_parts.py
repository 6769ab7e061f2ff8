"""Products of the parts of rows, against float64."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.gpu.gemm_parts import matmul_parts

NAN = float("nan")
ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.mark.parametrize(
    ("num_rows", "num_parts", "depth", "num_columns"),
    [(1, 3, 16, 40), (5, 2, 128, 64), (21, 2, 150, 70), (70, 1, 64, 129), (130, 1, 40, 8)],
)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_parts_of_rows(
    dtype: torch.dtype,
    num_rows: int,
    num_parts: int,
    depth: int,
    num_columns: int,
    device: str,
) -> None:
    wide = torch.randn(num_rows, num_parts, depth + 8, device=device).to(dtype)
    x, weight = wide[..., 8:], torch.randn(num_parts, num_columns, depth, device=device).to(dtype)
    found = torch.full((num_rows, num_parts, num_columns + 4), NAN, device=device, dtype=dtype)
    matmul_parts(x, weight, found[..., 4:])
    expected = torch.einsum("npk,pck->npc", x.double(), weight.double())
    torch.testing.assert_close(
        found[..., 4:].double(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype] * depth**0.5
    )
    assert found[..., :4].isnan().all(), "written in front of a part"


def test_rows_have_the_same_bits_among_others(device: str) -> None:
    """Integers, whose sums are exact: the interpreter's products of larger tiles round otherwise,
    as those of a GPU do not.
    """
    x = torch.randint(-3, 4, (40, 2, 24), device=device).float()
    weight = torch.randint(-3, 4, (2, 20, 24), device=device).float()
    together = torch.full((40, 2, 20), NAN, device=device)
    matmul_parts(x, weight, together)
    for rows in (slice(0, 1), slice(7, 24), slice(39, 40), slice(0, 0)):
        alone = torch.full_like(together[rows], NAN)
        matmul_parts(x[rows], weight, alone)
        assert torch.equal(alone, together[rows])


def test_torch_op(device: str) -> None:
    x, weight = torch.randn(3, 2, 16, device=device), torch.randn(2, 5, 16, device=device)
    out = torch.full((3, 2, 5), NAN, device=device)
    torch.ops.tokenmill.matmul_parts(x, weight, out)
    torch.testing.assert_close(out, torch.einsum("npk,pck->npc", x, weight), rtol=1e-5, atol=1e-5)
