"""The ranks that hold parts of the same layers, as one of them sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tokenmill.kernels import shared_group

_ATTEMPT_BITS = 12
"""Of a mark; the others are of the step's number."""

Gather = Callable[[torch.Tensor], torch.Tensor]
"""Rows ids, int32 or int64 [N], of a table: [N, size]."""


class TensorGroup(Protocol):
    """One rank among `size`. All make the same calls in the same order."""

    rank: int
    size: int

    def __hash__(self) -> int:
        """By identity: kernels are kept by group."""
        ...

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In what type products are made that `all_reduce` takes, of activations in `dtype`."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x [N, size], perhaps in the place of x; in the order of ranks, so
        that a row's bits do not depend on the others.
        """
        ...

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Float32 [N, widths[rank]] of each rank, side by side."""
        ...

    def lookup(self, ids: torch.Tensor, part: range, gather: Gather) -> torch.Tensor:
        """Rows ids [N] of a table of which this rank has those in `part`."""
        ...

    def begin(self, step_id: int, attempt: int) -> None:
        """What follows belongs to this attempt at this step. Ranks that have begun others fail."""
        ...

    @property
    def is_broken(self) -> bool:
        """Whether a rank has failed, so that no step is possible any more."""
        ...


class SoloGroup:
    """One rank has everything."""

    rank = 0
    size = 1
    is_broken = False

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return x

    def lookup(self, ids: torch.Tensor, part: range, gather: Gather) -> torch.Tensor:
        return gather(ids)

    def begin(self, step_id: int, attempt: int) -> None:
        """Nothing has to be told."""


SOLO = SoloGroup()


class SharedMemoryGroup:
    """Ranks of one machine: calls of native kernels, which recorded steps may hold."""

    def __init__(self, fd: int, rank: int, size: int) -> None:
        """`fd` is of the group's memory (`shared_group.create_memory`)."""
        self.rank = rank
        self.size = size
        self._shared = shared_group.SharedGroup(fd, rank, size)
        self.all_reduce = self._shared.all_reduce
        self.all_gather = self._shared.all_gather

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def lookup(self, ids: torch.Tensor, part: range, gather: Gather) -> torch.Tensor:
        found = gather(shared_group.local_ids(ids, part))
        rows = found if found.dtype == torch.float32 else found.float()
        shared_group.clear_others(ids, part, rows)
        self.all_reduce(rows)
        return rows if rows is found else rows.to(found.dtype)  # a sum with zeros is exact

    def begin(self, step_id: int, attempt: int) -> None:
        self._shared.begin((step_id << _ATTEMPT_BITS | attempt) & 0xFFFFFFFF)

    def break_up(self) -> None:
        """Have the others fail: this rank will not come."""
        self._shared.break_up()

    @property
    def is_broken(self) -> bool:
        return self._shared.is_broken
