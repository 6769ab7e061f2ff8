"""Many times in a few numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds."""

    mean: float
    percentiles: dict[str, float]
    """`p50`, ... to value."""


def spread(seconds: Sequence[float], percents: Sequence[float]) -> Spread:
    """Mean and percentiles, linear between neighbours; 0 of nothing."""
    ordered = sorted(1e3 * each for each in seconds) or [0.0]

    def at(percent: float) -> float:
        place = percent / 100 * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    mean = sum(ordered) / len(ordered)
    return Spread(mean, {f"p{percent:g}": at(percent) for percent in percents})


class Histogram:
    """Times by the million: each is kept to a thousandth of itself."""

    _STEPS = 1000.0
    """Bins of a factor e."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        """By bin, whose number is the logarithm of its times."""
        self.num_times = 0
        self.seconds = 0.0
        """The sum of all, exactly."""

    def add(self, seconds: float, count: int = 1) -> None:
        """`count` times of so many seconds, more than 0."""
        place = round(self._STEPS * math.log(seconds))
        self.counts[place] = self.counts.get(place, 0) + count
        self.num_times += count
        self.seconds += count * seconds

    def spread(self, percents: Sequence[float]) -> Spread:
        """Mean and percentiles; 0 of nothing."""
        mean = 1e3 * self.seconds / max(self.num_times, 1)
        return Spread(mean, {f"p{percent:g}": self._at(percent) for percent in percents})

    def _at(self, percent: float) -> float:
        left = percent / 100 * (self.num_times - 1)
        for place in sorted(self.counts):
            left -= self.counts[place]
            if left < 0:
                return 1e3 * math.exp(place / self._STEPS)
        return 0.0
