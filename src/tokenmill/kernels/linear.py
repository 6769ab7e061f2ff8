"""Linear projections whose rows do not depend on each other.

Matrix libraries choose another kernel, with another order of summation, for another number of
rows. So rows are computed in slabs of a fixed size, the last padded with zeros: one arithmetic for
any batch.
"""

from __future__ import annotations

import torch
from torch.nn import functional

SLAB_ROWS = 32
"""A bfloat16 slab of 32 rows costs what a single row costs: the weights are read once."""
FLOAT32_SLAB_ROWS = 8
"""Float32 rows cost arithmetic, and most steps need few of them."""
TILE_COLUMNS = 1024
"""Weight rows converted to float32 at a time; they stay in the cache until they are used."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x @ weight.T + bias [N, M] from x [N, K], weight [M, K] and bias [M] of one dtype.

    Sums are float32 and rounded once, after the bias.
    """
    slabs = torch.split(_pad_rows(x, SLAB_ROWS), SLAB_ROWS)
    return torch.cat([functional.linear(slab, weight, bias) for slab in slabs])[: x.shape[0]]


def linear_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute float32 x @ weight.T [N, M] from x [N, K] and weight [M, K] of any dtypes.

    For logits: bfloat16 keeps 8 bits, so neighbours among the best tokens would become ties.
    Weights are converted tile by tile, as no torch kernel of the CPU multiplies bfloat16 into
    float32.
    """
    padded = _pad_rows(x.float(), FLOAT32_SLAB_ROWS)
    out = padded.new_empty(padded.shape[0], weight.shape[0])
    for left in range(0, weight.shape[0], TILE_COLUMNS):
        columns = slice(left, left + TILE_COLUMNS)
        tile = weight[columns].float().t()
        for top in range(0, padded.shape[0], FLOAT32_SLAB_ROWS):
            rows = slice(top, top + FLOAT32_SLAB_ROWS)
            torch.mm(padded[rows], tile, out=out[rows, columns])
    return out[: x.shape[0]]


def _pad_rows(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Zero rows behind x [N, K], up to a multiple of rows."""
    return functional.pad(x, (0, 0, 0, -x.shape[0] % multiple))
