"""The largest rate, or the fewest workers, with which enough requests keep their goals.

A run is asked again and again, with the same requests in the same order; what is sought is taken
to be on one side of a border.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmill.errors import ConfigError
from tokenmill.simulate.report import SimulationReport

RATE_PRECISION = 1.02
"""The largest rate is found to within this factor."""
_MOST_DOUBLINGS = 24


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a search."""

    value: float
    """Requests a second, or workers."""
    keeps: bool
    report: SimulationReport


@dataclass(slots=True)
class Search:
    """Runs of `run`, which takes a rate or a number of workers; `share` of all requests must be
    good.
    """

    run: Callable[[float], SimulationReport]
    share: float
    trials: list[Trial] = field(default_factory=list)
    """In the order in which they were made."""

    def largest_rate(self, start: float) -> Trial:
        """The best trial, from a first guess. Raises `ConfigError` if no rate is small enough."""
        low, high = start, start
        if self._try(start):
            while self._try(high := 2 * high):
                low = high
                self._check(high, start)
        else:
            while not self._try(low := low / 2):
                high = low
                self._check(start, low)
        while high / low > RATE_PRECISION:
            middle = math.sqrt(low * high)
            if self._try(middle):
                low = middle
            else:
                high = middle
        return self._best(low)

    def fewest_workers(self, start: int) -> Trial:
        """The best trial, from a first guess. Raises `ConfigError` if no number is enough."""
        low, high = 0, start
        while not self._try(high):
            low, high = high, 2 * high
            self._check(high, start)
        while high - low > 1:
            middle = (low + high) // 2
            if self._try(middle):
                high = middle
            else:
                low = middle
        return self._best(high)

    def _try(self, value: float) -> bool:
        report = self.run(value)
        assert report.share_good is not None, "a search has goals"
        self.trials.append(Trial(value, report.share_good >= self.share, report))
        return self.trials[-1].keeps

    def _best(self, value: float) -> Trial:
        return next(trial for trial in self.trials if trial.value == value and trial.keeps)

    def _check(self, larger: float, smaller: float) -> None:
        if larger / smaller > 2**_MOST_DOUBLINGS:
            last = self.trials[-1]
            raise ConfigError(
                f"no border was found: {last.value:g} still {'keeps' if last.keeps else 'misses'}"
                f" the goals, with {last.report.share_good:.1%} of the requests. Choose other"
                f" goals (goodput) or lengths, or more requests (num_requests)."
            )
