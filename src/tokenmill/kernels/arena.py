"""Where kernels put their results.

Mostly `torch.empty`. While a step is recorded, its buffers must outlive the recording at fixed
addresses: then they come from an `Arena`, which hands a buffer out again as soon as nobody holds a
tensor in it. Replayed in the same order, the same sharing is right again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import numpy as np
import torch

_ALIGNMENT = 64
_arena: Arena | None = None


class Arena:
    """Buffers that live as long as this object, shared by tensors that do not live together."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for buffer in self._buffers)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with arbitrary contents, aligned to 64 bytes."""
        num_bytes = prod(shape) * dtype.itemsize
        free = [b for b in self._buffers if b.numel() >= num_bytes and _is_unused(b)]
        if free:
            buffer = min(free, key=torch.Tensor.numel)
        else:
            buffer = _allocate(num_bytes)
            self._buffers.append(buffer)
        return buffer[:num_bytes].view(dtype).view(shape)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a kernel's result."""
    return torch.empty(shape, dtype=dtype) if _arena is None else _arena.empty(shape, dtype)


@contextmanager
def allocate_from(arena: Arena) -> Iterator[None]:
    """Let `empty` take its memory from `arena` inside the block."""
    global _arena
    before, _arena = _arena, arena
    try:
        yield
    finally:
        _arena = before


def _allocate(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], by way of numpy: no operation of torch that a recording would refuse."""
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes])


def _is_unused(buffer: torch.Tensor) -> bool:
    """Whether no tensor but `buffer` itself lies in its memory."""
    storage = buffer.untyped_storage()
    # One count each for the buffer and for the handle in our hand.
    return bool(torch._C._storage_Use_Count(storage._cdata) <= 2)
