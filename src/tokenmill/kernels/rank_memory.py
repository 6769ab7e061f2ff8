"""The memory of a group of ranks, for whoever starts them; needs no torch."""

from __future__ import annotations

import os

from tokenmill.kernels import native

SLOT_BYTES = 1 << 18
"""What a rank hands over at a time: it stays in the caches until the others have read it."""


def create_memory(size: int) -> int:
    """A file descriptor of memory for a group of `size` ranks, which no path leads to."""
    fd = os.memfd_create("tokenmill-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, native.module().SharedGroup.memory_bytes(size, SLOT_BYTES))
    return fd
