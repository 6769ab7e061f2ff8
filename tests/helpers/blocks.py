"""Random blocks of GGUF types, and what the gguf library makes of them."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from tokenmill.kernels import gemm

HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Where a block's float16 numbers lie; at its start unless named here."""


def random_blocks(block_type: str, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(raw bytes, float32 weight [n, k]) of random blocks; the weight is what gguf makes of them.

    Codes and small scales are random bytes, scales and minimums random halves of all signs.
    """
    kind = gguf.GGMLQuantizationType[block_type]
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng([n, k])
    raw = rng.integers(0, 256, (n, k // values, num_bytes), dtype=np.uint8)
    for offset in HALVES.get(block_type, (0,)):
        halves = rng.normal(size=(n, k // values, 1)).astype(np.float16)
        raw[:, :, offset : offset + 2] = halves.view(np.uint8)
    if block_type == "MXFP4":
        raw[:, :, 0] = rng.integers(110, 132, raw.shape[:2])
    weight = gguf.dequantize(raw.reshape(n, -1), kind)
    return torch.from_numpy(raw.reshape(-1)), torch.from_numpy(weight)


def whole_blocks(block_type: str, k: int) -> int:
    """The nearest K from k on that has whole blocks."""
    values = gemm.BLOCK_VALUES[block_type]
    return -(-k // values) * values
