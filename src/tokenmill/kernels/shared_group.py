"""Sums and joins over the ranks of one machine, in memory that all of them map.

    all_reduce     x of each rank -> their sum          torch reference: `sum_in_order`
    all_gather     columns of each rank -> all columns  torch.cat
    local_ids      ids -> ids of a rank's part of a vocabulary
    clear_others   zeros in the rows of ids of other parts

A sum is taken in the order of ranks, so it has the same bits on each rank, in each run and for any
number of rows. All calls can be recorded. The layout is drawn in csrc/shared_group.h.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch

from tokenmill.kernels import arena, native
from tokenmill.kernels.rank_memory import SLOT_BYTES


class SharedGroup:
    """A rank's place in a group. To be used by one thread."""

    def __init__(self, fd: int, rank: int, size: int) -> None:
        """Take part as `rank` of `size` in the memory behind a descriptor of `create_memory`."""
        memory = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), np.uint8)
        self._native = native.module().SharedGroup(memory, rank, size, SLOT_BYTES)

    def begin(self, mark: int) -> None:
        """What follows belongs to this, a number of 32 bits; all ranks begin the same."""
        self._native.begin(mark)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x, float32 [N, size], which becomes the sum of all ranks' x.

        Raises `RuntimeError` if another rank has failed, or does something else.
        """
        self._native.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Float32 [N, widths[rank]] of each rank, side by side: [N, sum of widths].

        Raises as `all_reduce` does.
        """
        out = arena.empty(len(x), sum(widths), dtype=torch.float32)
        self._native.all_gather(x, list(widths), out)
        return out

    def break_up(self) -> None:
        """Have all ranks fail that wait for others, or come later."""
        self._native.break_up()

    @property
    def is_broken(self) -> bool:
        """Whether a rank has failed; nothing works any more then."""
        return bool(self._native.is_broken)


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """((0 + 1) + 2) + ... of float32 tensors of one shape."""
    return reduce(torch.add, parts)


def local_ids(ids: torch.Tensor, part: range) -> torch.Tensor:
    """Of ids, int32 [N], those in `part` counted from its begin; the others are 0."""
    out = arena.empty(len(ids), dtype=torch.int32)
    native.module().local_ids(ids, part.start, len(part), out)
    return out


def clear_others(ids: torch.Tensor, part: range, x: torch.Tensor) -> None:
    """Put zeros into the rows of x, float32 [N, size], whose ids, int32 [N], are not in `part`."""
    native.module().clear_others(ids, part.start, len(part), x)
