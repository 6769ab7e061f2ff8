"""Requests that wait, in the order in which they start."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Protocol

from tokenmill.core.request import Request


class RequestQueue(Protocol):
    """Waiting requests; all operations take O(1) or O(log n)."""

    def add(self, request: Request) -> None:
        """Queue a request that has just arrived."""
        ...

    def prepend(self, request: Request) -> None:
        """Put a request back that was here before: it waits in front of later arrivals."""
        ...

    def peek(self) -> Request:
        """The first request; the queue must not be empty."""
        ...

    def pop(self) -> Request:
        """Take the first request out; the queue must not be empty."""
        ...

    def remove(self, request: Request) -> None:
        """Take out a request that is here."""
        ...

    def __len__(self) -> int: ...


class FCFSRequestQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def prepend(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)


class PriorityRequestQueue:
    """Smallest (priority, arrival time, id) first.

    A heap of keys beside a dictionary of the requests that are here. Removing touches only the
    dictionary; a key without its request is dropped when it comes up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str]] = []
        self._requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, request.sort_key)

    def prepend(self, request: Request) -> None:
        # Its key, with the old arrival time, already puts it in front of later ones.
        self.add(request)

    def peek(self) -> Request:
        while self._heap[0][-1] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0][-1]]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._requests[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        if len(self._heap) > 2 * len(self._requests) + 64:
            self._heap = [waiting.sort_key for waiting in self._requests.values()]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._requests)
