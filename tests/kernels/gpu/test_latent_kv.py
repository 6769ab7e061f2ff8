"""Rotated queries and keys, and the cache of latents that takes the keys."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.gpu.latent_kv import (
    rotate_and_write_latents,
    rotate_and_write_latents_reference,
)

NAN = float("nan")
FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, FLOAT8),
    ],
    ids=str,
)
def test_rows_are_those_of_the_reference(
    dtype: torch.dtype, cache_dtype: torch.dtype, device: str
) -> None:
    num_heads, half, key_size, block_size = 5, 4, 23, 4
    query = torch.randn(6, num_heads * key_size + 2, device=device).to(dtype)[:, 2:]
    key = torch.randn(6, key_size + 9, device=device).to(dtype)[:, :key_size]
    positions = torch.tensor([0, 7, 3, 1, 0, 2], device=device)
    angles = torch.randn(8, half, device=device)
    slots = torch.tensor([9, 4, -1, 0, 11, -1], device=device)
    found, expected = [], []
    for run, results in (
        (rotate_and_write_latents, found),
        (rotate_and_write_latents_reference, expected),
        (torch.ops.tokenmill.rotate_and_write_latents, []),
    ):
        cache = torch.full((3, 1, block_size, 1, key_size), NAN, device=device).to(cache_dtype)
        out = torch.full((6, num_heads * key_size), NAN, device=device, dtype=dtype)
        run(query, key, positions, angles.cos(), angles.sin(), cache, slots, out, 0.7)
        results += [out.float(), cache.float()]
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype] * (
        16 if cache_dtype == FLOAT8 else 1
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
    # Four slots were written, and nothing beside them.
    assert int((~found[1].isnan()).sum()) == 4 * key_size


def test_no_token(device: str) -> None:
    nothing = torch.empty(0, 32, device=device)
    positions = torch.empty(0, dtype=torch.int64, device=device)
    angles, cache = torch.zeros(1, 4, device=device), torch.zeros(1, 1, 4, 1, 16, device=device)
    args = nothing, nothing[:, :16], positions, angles, angles
    rotate_and_write_latents(*args, cache, positions, nothing)
