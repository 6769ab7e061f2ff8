"""Four-bit blocks taken apart are the values that they dequantise to."""

from __future__ import annotations

import pytest
import torch

from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.quantization.dequantize import dequantize
from tokenmill.quantization.four_bit import FOUR_BIT_FORMATS, GROUP_SIZE, four_bit_parts

BLOCKS = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144)}


def raw_tensor(kind: str, num_rows: int, heads: int | None = None) -> RawTensor:
    """Two blocks a row, of random bytes under scales that float16 can hold."""
    size, num_bytes = BLOCKS[kind]
    blocks = torch.randint(0, 256, (num_rows * 2, num_bytes), dtype=torch.uint8)
    num_scales = 1 if kind == "Q4_0" else 2
    scales = torch.randn(len(blocks), num_scales).half()
    blocks[:, : 2 * num_scales] = scales.view(torch.uint8)
    return RawTensor((num_rows, 2 * size), kind, blocks.view(-1), heads)


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("kind", FOUR_BIT_FORMATS)
def test_parts_are_the_values(kind: str, heads: int | None) -> None:
    raw = raw_tensor(kind, 8, heads)
    codes, scale, minimum = four_bit_parts(raw)
    assert codes.shape == raw.shape
    assert codes.max() == 15
    group = torch.arange(raw.shape[1]) // GROUP_SIZE
    values = codes.float() * scale[:, group] + minimum[:, group]
    wanted = dequantize(raw, torch.float32)
    torch.testing.assert_close(values, wanted, rtol=1e-6, atol=1e-5)
