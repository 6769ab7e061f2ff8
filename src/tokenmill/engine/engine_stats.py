"""A served engine in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.contracts.request import SchedulerStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counters grow for as long as the front end lives: a core that is started again
    goes on where the one before stopped.
    """

    scheduler: SchedulerStats = field(default_factory=SchedulerStats)
    """As of the last message of the core."""
    num_unfinished: int = 0
    """Sequences that somebody waits for, wherever they are."""
    num_restarts: int = 0
    num_refused: int = 0
    """Requests refused because the queue was full."""
    num_aborted: int = 0
    """Sequences that were ended from outside: by a client that left, a deadline, or the end of the
    server."""

    @property
    def num_running(self) -> int:
        return min(self.scheduler.num_running, self.num_unfinished)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run yet, or not now: on the way to the core included."""
        return self.num_unfinished - self.num_running
