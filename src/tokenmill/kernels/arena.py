"""Where kernels put their results.

Mostly `torch.empty`. While a step is recorded, its buffers must outlive the recording at fixed
addresses: then they come from an `Arena`, which hands a buffer out again as soon as nobody holds a
tensor in it. Replayed in the same order, the same sharing is right again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod

import numpy as np
import torch

_ALIGNMENT = 64
_arena: Arena | None = None


class Arena:
    """Buffers that live as long as this object, shared by tensors that do not live together."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.num_bytes for buffer in self._buffers)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with arbitrary contents, aligned to 64 bytes."""
        num_bytes = prod(shape) * dtype.itemsize
        free = [each for each in self._buffers if each.num_bytes >= num_bytes and each.is_unused]
        if free:
            buffer = min(free, key=lambda each: each.num_bytes)
        else:
            buffer = _Buffer(num_bytes)
            self._buffers.append(buffer)
        return buffer.tensor(num_bytes).view(dtype).view(shape)


class _Buffer:
    """Memory of numpy's: to lend it is no operation of torch that a recording would refuse."""

    def __init__(self, num_bytes: int) -> None:
        memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        self._memory = memory[start : start + num_bytes]
        self.num_bytes = num_bytes
        self._lent: Callable[[], object | None] = lambda: None
        """The array that torch holds for as long as a tensor lies in it; None once none does."""

    @property
    def is_unused(self) -> bool:
        """Whether no tensor lies in the memory."""
        return self._lent() is None

    def tensor(self, num_bytes: int) -> torch.Tensor:
        """The first bytes, uint8 [num_bytes]."""
        part = self._memory[:num_bytes]
        self._lent = weakref.ref(part)
        return torch.from_numpy(part)


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
