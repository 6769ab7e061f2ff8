"""Rows of the workers' tables."""

from __future__ import annotations

import heapq


class RowAllocator:
    """Hands out the smallest free row, so that the used part of the tables stays short."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows))  # sorted, so it is a heap

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The smallest free row, in O(log n). There must be one."""
        return heapq.heappop(self._free)

    def release(self, row: int) -> None:
        """Give `row` back, in O(log n)."""
        heapq.heappush(self._free, row)
