"""Triton's interpreter, with the rounding of a GPU.

By itself it cuts float32 to bfloat16 instead of rounding, and loses the carry where rounding to
float8 reaches the next power of two: 1.99 becomes 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH_DTYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def round_like_a_gpu() -> None:
    """Let conversions round to nearest, ties to even; float8 saturates. Once per process."""
    given = interpreter._convert_float

    def convert(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        if rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ:
            return given(data, source, target, rounding_mode)
        try:
            from_dtype, to_dtype = _TORCH_DTYPES[source], _TORCH_DTYPES[target]
        except KeyError:
            return given(data, source, target, rounding_mode)
        values = torch.frombuffer(bytearray(data.tobytes()), dtype=from_dtype).float()
        if to_dtype in _FLOAT8:
            largest = torch.finfo(to_dtype).max
            values = values.clamp(-largest, largest)
        bits = values.to(to_dtype).view(torch.uint8).numpy()
        return bits.view(f"uint{target.primitive_bitwidth}").reshape(data.shape)

    interpreter._convert_float = convert
