"""A served engine in numbers."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import msgspec

from tokenmill.contracts.request import SchedulerStats

_STATE = ("num_running", "num_waiting", "num_used_blocks", "num_blocks")
"""Fields of `SchedulerStats` that come and go; all others are counters."""
_COUNTERS = tuple(name for name in SchedulerStats.__struct_fields__ if name not in _STATE)


def _sum(before: Any, latest: Any) -> Any:
    """Of counters, or of lists of them."""
    if isinstance(before, list):
        return [sum(each) for each in zip_longest(before, latest, fillvalue=0)]
    return before + latest


class EngineStats(SchedulerStats, array_like=True, omit_defaults=True):
    """The scheduler's state as of the core's last message, and what the front end knows.

    `num_waiting` counts every sequence that does not run yet or not now, those on the way to the
    core included. Counters grow for as long as the front end lives: a core that is started again
    goes on where the one before stopped.
    """

    num_unfinished: int = 0
    """Sequences that somebody waits for, wherever they are."""
    num_restarts: int = 0
    """How often the core was started again."""
    num_refused: int = 0
    """Requests refused because the queue was full."""
    num_aborted: int = 0
    """Sequences that were ended from outside: by a client that left, a deadline, or the end of the
    server."""
    num_output_tokens: int = 0
    """Tokens that have come from the core, whether or not their client has them yet."""
    running_adapters: list[str] = []
    """Names of adapters that have brought tokens for an unfinished request."""
    waiting_adapters: list[str] = []
    """Names of adapters with unfinished requests, none of which has a token yet."""
    is_healthy: bool = True
    """Of one core among several: whether it lives and gets on."""
    replicas: list[EngineStats] = []
    """Each core in numbers, where there are several; the others are then their sums."""


_SUMMED = (
    *SchedulerStats.__struct_fields__,
    "num_unfinished", "num_restarts", "num_aborted", "num_output_tokens",
)  # fmt: skip


def total(parts: list[EngineStats]) -> EngineStats:
    """Several cores as one."""
    if len(parts) == 1:
        return parts[0]
    sums = {name: getattr(parts[0], name) for name in _SUMMED}
    for part in parts[1:]:
        sums = {name: _sum(sums[name], getattr(part, name)) for name in _SUMMED}
    return EngineStats(**sums, replicas=parts)


class StatsKeeper:
    """The latest statistics of a core, and the counters of those before it."""

    def __init__(self) -> None:
        self._latest = SchedulerStats()
        self._before = SchedulerStats()
        self.num_restarts = 0
        self.num_aborted = 0
        self.num_output_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that waited in the core when it sent its latest message."""
        return self._latest.num_waiting

    def update(self, stats: SchedulerStats) -> None:
        """Take the core's latest."""
        self._latest = stats

    def core_ended(self) -> None:
        """Nothing runs any more, and the next core counts from zero."""
        self._before = self._summed()
        self._latest = SchedulerStats(num_blocks=self._latest.num_blocks)

    def snapshot(self, num_unfinished: int) -> EngineStats:
        """All of it, while so many sequences are unfinished."""
        latest = msgspec.structs.asdict(self._summed())
        latest["num_running"] = min(self._latest.num_running, num_unfinished)
        latest["num_waiting"] = num_unfinished - latest["num_running"]
        return EngineStats(
            **latest,
            num_unfinished=num_unfinished,
            num_restarts=self.num_restarts,
            num_aborted=self.num_aborted,
            num_output_tokens=self.num_output_tokens,
        )

    def _summed(self) -> SchedulerStats:
        """The latest state, with counters since the start of the front end."""
        sums = {
            name: _sum(getattr(self._before, name), getattr(self._latest, name))
            for name in _COUNTERS
        }
        return msgspec.structs.replace(self._latest, **sums)
