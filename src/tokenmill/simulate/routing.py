"""Which of several workers takes a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tokenmill.config.engine_config import CacheConfig
from tokenmill.contracts.request import EngineCoreRequest
from tokenmill.engine.replica_balancer import ReplicaBalancer


class Router(Protocol):
    """Sends requests to workers, by what it knows of them: how much each has to do."""

    def assign(self, request: EngineCoreRequest, loads: dict[int, float]) -> int:
        """The worker, by its number, that is to have a request, which is taken to get it. Loads
        are those of all workers (`engine.prefix_index`).
        """
        ...


class RoundRobin:
    """One after another."""

    def __init__(self) -> None:
        self._num_assigned = 0

    def assign(self, request: EngineCoreRequest, loads: dict[int, float]) -> int:
        self._num_assigned += 1
        return (self._num_assigned - 1) % len(loads)


class LeastLoaded:
    """Where there is least to do; among equals, the first behind the one that was chosen last."""

    def __init__(self) -> None:
        self._last = -1

    def assign(self, request: EngineCoreRequest, loads: dict[int, float]) -> int:
        count, start = len(loads), self._last + 1
        least = min(loads.values())
        order = (number % count for number in range(start, start + count))
        self._last = next(number for number in order if loads[number] == least)
        return self._last


ROUTERS: dict[str, Callable[[int, CacheConfig], Router]] = {
    "round_robin": lambda num_workers, cache: RoundRobin(),
    "least_loaded": lambda num_workers, cache: LeastLoaded(),
    "prefix": ReplicaBalancer,
}
"""By their names in `SimulateOptions.routing`."""
