"""The clock: arrivals, and ends of steps, in the order of their times."""

from __future__ import annotations

import gc
import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tokenmill.engine.prefix_index import WAITING_WEIGHT
from tokenmill.simulate.recorder import Recorder
from tokenmill.simulate.requests import SimulatedRequest
from tokenmill.simulate.routing import Router
from tokenmill.simulate.worker import NEVER, SimulatedWorker
from tokenmill.simulate.workload import Workload


class Simulation:
    """Workers, and requests that are sent to them. `run` it once.

    At one moment requests come before steps end, so that a step that is planned then sees them.
    """

    def __init__(
        self,
        workers: Sequence[SimulatedWorker],
        router: Router,
        workload: Workload,
        recorder: Recorder,
    ) -> None:
        self._workers, self._router = workers, router
        self._workload, self._recorder = workload, recorder
        self._loads = dict.fromkeys(range(len(workers)), 0.0)
        self._events: list[tuple[float, int]] = []
        """(Time, worker), a heap; a worker's other entries than `_due` says are of no use."""
        self._due = [NEVER] * len(workers)
        self._followers: list[tuple[float, int, SimulatedRequest]] = []
        """Of sessions, a heap by (time, number)."""

    def run(self) -> None:
        """Until every request has ended."""
        with _no_collection():
            arrivals = self._workload.arrivals()
            arrival = next(arrivals, None)
            while True:
                arrives = NEVER if arrival is None else arrival.arrival
                follows = self._followers[0][0] if self._followers else NEVER
                ends = self._next_end()
                if arrives <= min(follows, ends) and arrival is not None:
                    self._send(arrival)
                    arrival = next(arrivals, None)
                elif follows <= ends and self._followers:
                    self._send(heapq.heappop(self._followers)[2])
                elif ends < NEVER:
                    self._advance(heapq.heappop(self._events)[1])
                else:
                    return

    def _next_end(self) -> float:
        while self._events and self._due[self._events[0][1]] != self._events[0][0]:
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else NEVER

    def _send(self, request: SimulatedRequest) -> None:
        number = self._router.assign(request.to_core(), self._loads)
        if self._workers[number].add(request, request.arrival):
            self._watch(number)
        else:
            self._recorder.num_refused += 1

    def _advance(self, number: int) -> None:
        worker = self._workers[number]
        self._due[number] = NEVER
        for request in worker.advance():
            self._recorder.end(request, worker.now)
            following = self._workload.following(request, worker.now)
            if following is not None:
                entry = following.arrival, following.number, following
                heapq.heappush(self._followers, entry)
        self._watch(number)

    def _watch(self, number: int) -> None:
        """Note when a worker has something to do, and how much."""
        worker = self._workers[number]
        self._loads[number] = WAITING_WEIGHT * worker.num_waiting + worker.num_running
        due = worker.next_event
        if due != self._due[number]:
            self._due[number] = due
            if due < NEVER:
                heapq.heappush(self._events, (due, number))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Blocks by the million refer to each other, and none of them is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
