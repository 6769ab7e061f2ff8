"""Metrics as objects, for whoever has no Prometheus: what `LLM.get_metrics` gives."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
"""Bounds of buckets for the times of requests."""
TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""For the times of tokens."""
COUNTS = (1, 2, 5, 10, 20)
"""For small numbers."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric with its labels."""

    name: str
    """As in Prometheus, without `_total`."""
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Several counters that belong together, such as one for each place of a draft."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """Comes and goes."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """How often values up to a bound were seen."""

    count: int
    sum: float
    buckets: dict[str, int]
    """By upper bound, `+Inf` the last; each has what is in those before it."""


@dataclass(slots=True)
class Buckets:
    """A histogram that is being filled."""

    bounds: Sequence[float]
    sum: float = 0.0
    _counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def histogram(self, name: str, labels: Mapping[str, str]) -> Histogram:
        """As of now."""
        buckets, total = {}, 0
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        for bound, count in zip(names, self._counts, strict=True):
            total += count
            buckets[bound] = total
        return Histogram(name, labels, total, self.sum, buckets)


def one_two_five(longest: int) -> list[float]:
    """1, 2, 5, 10, ... up to the first that is not below `longest`."""
    bounds: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            bounds.append(step * scale)
            if step * scale >= longest:
                return bounds
        scale *= 10
