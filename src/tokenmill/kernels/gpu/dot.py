"""The product of tiles, so that it means the same compiled and interpreted."""

from __future__ import annotations

import os

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(
    a: tl.tensor, b: tl.tensor, total: tl.tensor, MOST_IMPRECISE: tl.constexpr = 0
) -> tl.tensor:
    """Add a @ b of tiles of one type to the float32 total.

    Float32 is multiplied as such, without the matrix units. The interpreter keeps bfloat16 values
    as integers, and would multiply those.

    The matrix unit adds float8 products with few bits; after MOST_IMPRECISE of them its sum is
    added to the total.
    """
    if IS_INTERPRETED:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        result = tl.dot(a, b, total, input_precision="ieee", max_num_imprecise_acc=MOST_IMPRECISE)
    return result
