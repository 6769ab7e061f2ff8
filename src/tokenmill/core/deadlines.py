"""Requests that must end by a certain time."""

from __future__ import annotations

import heapq
import math

from tokenmill.contracts.request import EngineCoreRequest


class Deadlines:
    """A heap of deadlines; those of requests that ended before are simply reported late."""

    def __init__(self) -> None:
        self._pending: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def next(self) -> float:
        """The first deadline; infinity if there is none."""
        return self._pending[0][0] if self._pending else math.inf

    def add(self, request: EngineCoreRequest) -> None:
        """Watch the request's deadline, if it has one."""
        if request.deadline is not None:
            heapq.heappush(self._pending, (request.deadline, request.request_id))

    def pop_overdue(self, now: float) -> list[str]:
        """Ids whose deadline is not after `now`, each once, in order of their deadlines."""
        overdue = []
        while self.next <= now:
            overdue.append(heapq.heappop(self._pending)[1])
        return overdue
