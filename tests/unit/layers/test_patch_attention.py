"""Attention among patches: the native kernels against torch's, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels import native
from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.packed import NativeKernels
from tokenmill.layers.patch_attention import Angles, attend_patches
from tokenmill.layers.plain import PlainKernels

LENGTHS = [1, 300, 64, 65, 7, 520]
"""Runs of less than a block, of whole ones, and of several partitions of keys."""


def inputs(head_size: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], Angles]:
    """Queries, keys and values side by side, as a projection makes them; and angles."""
    generator = torch.Generator().manual_seed(head_size)
    total = sum(LENGTHS)
    qkv = torch.randn(total, 3, 3, head_size, generator=generator).to(dtype)
    turns = torch.rand(total, head_size // 2, generator=generator) * 6
    return list(qkv.unbind(1)), (turns.cos(), turns.sin())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [16, 64, 72, 80, 100, 256])
def test_kernels_agree(head_size: int, dtype: torch.dtype) -> None:
    if not native.is_available():
        return  # there is one implementation
    rows, angles = inputs(head_size, dtype)
    for given in (None, angles):
        for lengths in (None, LENGTHS):
            found, wanted = (
                attend_patches(kernels, *rows, angles=given, lengths=lengths)
                for kernels in (NativeKernels(), PlainKernels())
            )
            assert found.dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)


def test_a_head_that_kernels_do_not_know() -> None:
    rows, angles = inputs(288, torch.float32)
    found, wanted = (
        attend_patches(kernels, *rows, angles=angles, lengths=LENGTHS)
        for kernels in (NativeKernels(), PlainKernels())
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", [NativeKernels(), PlainKernels()], ids=["native", "torch"])
def test_a_run_sees_itself_alone(kernels: LayerKernels, dtype: torch.dtype) -> None:
    if isinstance(kernels, NativeKernels) and not native.is_available():
        return
    rows, angles = inputs(64, dtype)
    together = attend_patches(kernels, *rows, angles=angles, lengths=LENGTHS)
    start = 0
    for length in LENGTHS:
        run = slice(start, start + length)
        alone = attend_patches(
            kernels, *(each[run] for each in rows), angles=(angles[0][run], angles[1][run])
        )
        assert torch.equal(together[run], alone)
        start += length
