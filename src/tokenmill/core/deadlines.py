"""Requests that must end by a certain time."""

from __future__ import annotations

import heapq

from tokenmill.contracts.request import EngineCoreRequest


class Deadlines:
    """A heap of deadlines; those of requests that ended before are simply reported late."""

    def __init__(self) -> None:
        self.pending: list[tuple[float, str]] = []
        """Deadlines to come, with their requests; a heap."""

    def add(self, request: EngineCoreRequest) -> None:
        """Watch the request's deadline, if it has one."""
        if request.deadline is not None:
            heapq.heappush(self.pending, (request.deadline, request.request_id))

    def pop_overdue(self, now: float) -> list[str]:
        """Ids whose deadline is not after `now`, each once, in order of their deadlines."""
        overdue = []
        while self.pending and self.pending[0][0] <= now:
            overdue.append(heapq.heappop(self.pending)[1])
        return overdue
