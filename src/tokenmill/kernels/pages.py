"""Memory that is given back to the system, at addresses that stay."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable

import torch


def release_pages(tensor: torch.Tensor) -> int:
    """Let go of the whole pages within a tensor's memory; the bytes of these.

    When they are touched again they hold zeros, or, of a file that is mapped, what it holds.
    Nothing is done (0) with a tensor with gaps, and on a system that does not work so: only Linux
    does. Raises `OSError`.
    """
    call = _madvise()
    if call is None or not tensor.is_contiguous() or tensor.device.type != "cpu":
        return 0
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin >= end:
        return 0
    if call(begin, end - begin, mmap.MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return end - begin


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call.restype = ctypes.c_int
    return call
