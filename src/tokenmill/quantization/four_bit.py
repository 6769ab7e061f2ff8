"""Four-bit formats taken apart, in groups of 32 values.

GGUF's    value = code * scale + minimum
MXFP4     value = e2m1 float of the code * 2 ** (exponent - 127)
"""

from __future__ import annotations

import torch

from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.quantization.dequantize import (
    block_codes,
    block_half,
    k_scales,
    nibbles,
    rows_in_order,
)

FOUR_BIT_FORMATS = ("Q4_0", "Q4_1", "Q4_K")
GROUP_SIZE = 32
"""Values of a row that share a scale and a minimum."""

_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q4_K": 144}


def four_bit_parts(raw: RawTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K], scale and minimum float32 [N, K / 32] of a tensor in a four-bit format.

    Rows are in Hugging Face's order.
    """
    num_rows, num_columns = raw.shape
    blocks = rows_in_order(raw).view(-1, _BLOCK_BYTES[raw.format])
    scale = block_half(blocks, 0)
    if raw.format == "Q4_0":
        codes, minimum = block_codes(blocks, 2), -8 * scale
    elif raw.format == "Q4_1":
        codes, minimum = block_codes(blocks, 4), block_half(blocks, 2)
    else:
        codes = nibbles(blocks[:, 16:].reshape(-1, 4, 32))
        scale, offset = k_scales(blocks)
        minimum = -offset
    shape = (num_rows, num_columns // GROUP_SIZE)
    return codes.view(num_rows, num_columns), scale.view(shape), minimum.view(shape)


def mxfp4_parts(raw: RawTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K] and exponents uint8 [N, K / 32] of a tensor in MXFP4.

    Rows are in Hugging Face's order.
    """
    num_rows, num_columns = raw.shape
    blocks = rows_in_order(raw).view(num_rows, num_columns // GROUP_SIZE, 1 + GROUP_SIZE // 2)
    codes = block_codes(blocks.flatten(0, 1), 1)
    return codes.view(num_rows, num_columns), blocks[..., 0]
