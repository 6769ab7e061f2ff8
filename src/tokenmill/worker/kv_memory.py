"""Memory for KV caches."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

HUGE_PAGE = 2 << 20  # bytes


def empty_kv_cache(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A cache whose values may be anything, but for zeros in block 0, the null block: a kernel may
    read it, though it uses nothing of it. On huge pages, if it lies in the processor's memory.

    A step reads blocks from all over a cache; with small pages, looking up where they are takes a
    tenth of its time. Pages cost memory only when they are first written.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        cache = torch.empty(shape, dtype=dtype, device=device)
        cache[0].zero_()
        return cache
    # One more than needed, so that there is an aligned start.
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    values = torch.frombuffer(memory, dtype=torch.uint8)
    start = -values.data_ptr() % HUGE_PAGE
    return values[start : start + num_bytes].view(dtype).view(shape)  # zeros until written
