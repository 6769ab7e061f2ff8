"""A file's bytes as memory, and what the system is told about their use."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14: read pages and map them, without a fault for each."""
_PAGE = mmap.PAGESIZE


class MappedFile:
    """A file, mapped once; its bytes may be written to, which changes neither the file nor another
    process's view.

    The mapping lasts as long as this object or any tensor of it does.
    """

    def __init__(self, path: Path) -> None:
        """Raises `CheckpointError` for a file that is empty or cannot be read."""
        self.path = path
        try:
            with path.open("rb") as file:
                # Copy on write: torch asks for writable memory, and the file must never change.
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError as error:
            raise CheckpointError(f"{path}: the file is empty.") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))

    def tensor(self, begin: int, end: int) -> torch.Tensor:
        """Bytes [begin, end) as uint8 [end - begin]."""
        import torch

        if begin == end:  # torch takes no empty buffer
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.data, dtype=torch.uint8, count=end - begin, offset=begin)

    def populate(self, begin: int, end: int) -> None:
        """Read bytes [begin, end) from the disk and map them; other threads go on meanwhile.

        Does nothing where the system cannot: pages are read when they are touched. Raises
        `CheckpointError` where touching them would end the process.
        """
        first = begin // _PAGE * _PAGE
        if _madvise(self._address + first, end - first, _POPULATE_READ) == errno.EFAULT:
            raise CheckpointError(
                f"{self.path}: bytes {begin} to {end} cannot be read: the file has been cut short,"
                f" or the disk has failed. Fetch it again."
            )

    def release(self, begin: int, end: int) -> None:
        """Let go of the pages within [begin, end): they leave the process, not the page cache, and
        come back when they are touched. What was written to them is lost.
        """
        first, last = -(-begin // _PAGE) * _PAGE, end // _PAGE * _PAGE
        if first < last:
            _madvise(self._address + first, last - first, mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class FileRange:
    """Where a tensor's bytes lie in a file."""

    file: MappedFile
    begin: int
    end: int

    def need(self, begin: int, end: int) -> None:
        """Bytes [begin, end) of the range are about to be touched."""

    def release(self, begin: int, end: int) -> None:
        """Bytes [begin, end) of the range are done with."""
        self.file.release(self.begin + begin, self.begin + end)


def _madvise(address: int, num_bytes: int, advice: int) -> int:
    """The error's number, 0 for none. Advice that the system does not know is no error here."""
    call = _system_call()
    if call is None or call(address, num_bytes, advice) == 0:
        return 0
    return ctypes.get_errno()


@functools.cache
def _system_call() -> Callable[[int, int, int], int] | None:
    """`madvise`, which Python's own mapping calls without letting other threads run."""
    if os.name != "posix" or not hasattr(mmap, "MADV_DONTNEED"):
        return None
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call.restype = ctypes.c_int
    return call
