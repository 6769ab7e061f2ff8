"""How many drafts are worth their time.

A step reads the weights, however many tokens it has, and computes each token. A draft brings a
token with the probability that it and those before it hold. With one request reading is most of a
step, and many drafts are worth their time; with many requests it is not, and hardly any draft is.
What steps of each size take is measured, since it depends on the machine, the model, its weights
and the contexts; the drafts that are sent are those that promise the most tokens a second.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_LEAST_GAIN = 0.05
"""A draft that holds less often is never worth the trouble."""
_LEAST_SPEEDUP = 1.1
"""What drafts must promise together, as planning and settling them is not in the measured time."""
_MEMORY = 0.9
_MOST_WEIGHT = 20
"""A mean of so many steps is as good as any: later ones replace earlier ones."""
_FIT_EVERY = 8
"""Steps between two looks at the means."""
_SHORTEST = 1e-6
"""Seconds that a step takes at least."""
_FIRST_PLAIN = 3
_PLAIN_EVERY = 64
"""Steps without drafts: so many at first, and then one in so many, or there is nothing to compare
with.
"""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step by its tokens: straight lines between the sizes that are known, two at
    least, in rising order.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def line(cls, base: float, per_token: float) -> StepCost:
        """The same for each token."""
        return cls((0.0, 1.0), (base, base + per_token))

    def of(self, num_tokens: float) -> float:
        """More than 0. Outside of the sizes that are known, the line from the smallest to the
        largest goes on; it does not fall.
        """
        sizes, seconds = self.sizes, self.seconds
        if sizes[0] <= num_tokens <= sizes[-1]:
            right = max(bisect_left(sizes, num_tokens), 1)
            start = left = right - 1
        else:
            left, right = 0, -1
            start = left if num_tokens < sizes[0] else right
        slope = (seconds[right] - seconds[left]) / (sizes[right] - sizes[left])
        if right < 0:
            slope = max(slope, 0.0)
        return max(seconds[start] + slope * (num_tokens - sizes[start]), _SHORTEST)


FREE_DRAFTS = StepCost.line(base=1.0, per_token=0.0)
"""As long as nothing is known: the first drafts show what drafts cost."""


@dataclass(slots=True)
class _Mean:
    """Of the steps of about one size."""

    size: float
    seconds: float
    weight: float = 0.0
    """How many steps it is of, up to `_MOST_WEIGHT`."""

    def add(self, size: int, seconds: float) -> None:
        share = max(1.0 / (self.weight + 1.0), 1.0 - _MEMORY)
        # A step that something else has held up says little.
        self.seconds += share * (min(seconds, 3.0 * self.seconds) - self.seconds)
        self.size += share * (size - self.size)
        self.weight = min(self.weight + 1.0, _MOST_WEIGHT)


class StepTimer:
    """Measures steps, each size for itself: they are no line where one size has another kernel."""

    def __init__(self, largest: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Only steps in which no request has more than `largest` tokens count: prompts are
        computed in larger ones.
        """
        self.cost = FREE_DRAFTS
        self._largest = largest
        self._clock = clock
        self._num_tokens = 0
        self._begun = 0.0
        self._means: dict[int, _Mean] = {}
        self._num_steps = 0
        self._is_plain = False
        self._num_plain = 0
        self._num_since_plain = 0

    @property
    def wants_plain(self) -> bool:
        """Whether the next step should have no drafts."""
        return self._num_plain < _FIRST_PLAIN or self._num_since_plain >= _PLAIN_EVERY

    def begin(self, num_scheduled_tokens: Sequence[int]) -> None:
        """A step begins."""
        longest = max(num_scheduled_tokens, default=0)
        self._num_tokens = sum(num_scheduled_tokens) if longest <= self._largest else 0
        self._is_plain = longest == 1
        self._begun = self._clock()

    def end(self) -> None:
        """It is over."""
        size = self._num_tokens
        if not size:
            return
        seconds = self._clock() - self._begun
        mean = self._means.setdefault(_about(size), _Mean(size, seconds))
        mean.add(size, seconds)
        self._num_tokens = 0
        self._num_steps += 1
        self._num_plain += self._is_plain
        self._num_since_plain = 0 if self._is_plain else self._num_since_plain + 1
        if len(self._means) > 1 and (self._num_steps % _FIT_EVERY == 0 or mean.weight == 1.0):
            known = sorted(self._means.values(), key=lambda mean: mean.size)
            self.cost = StepCost(
                tuple(mean.size for mean in known), tuple(mean.seconds for mean in known)
            )


def _about(size: int) -> int:
    """The same number for sizes within an eighth of each other."""
    return size - size % (1 << max(size.bit_length() - 4, 0))


def choose_lengths(
    rates: Sequence[float], most: Sequence[int], num_reqs: int, cost: StepCost
) -> list[int]:
    """How many drafts each request should have, so that the next step brings the most a second.

    A draft of request i holds with probability rates[i] if those before it do; it may have at most
    most[i]. The step has `num_reqs` requests in all, with a token each besides.
    """
    gains = sorted(
        (
            (rate**place, index)
            for index, (rate, count) in enumerate(zip(rates, most, strict=True))
            for place in range(1, count + 1)
        ),
        reverse=True,
    )
    num_new, best, best_worth = float(num_reqs), 0, _LEAST_SPEEDUP * num_reqs / cost.of(num_reqs)
    for number, (gain, _) in enumerate(gains, start=1):
        if gain < _LEAST_GAIN:
            break
        num_new += gain
        worth = num_new / cost.of(num_reqs + number)
        if worth > best_worth:
            best, best_worth = number, worth
    lengths = [0] * len(rates)
    for _, index in gains[:best]:  # a request's own come in their order, as gains fall
        lengths[index] += 1
    return lengths


def choose_depth(
    rates: Sequence[float],
    most: Sequence[int],
    num_reqs: int,
    cost: StepCost,
    pass_seconds: float,
) -> list[int]:
    """`choose_lengths` where drafts are made in passes of `pass_seconds`, one for all requests."""
    best = [0] * len(rates)
    best_worth = _LEAST_SPEEDUP * num_reqs / cost.of(num_reqs)
    gained = [0.0] * len(rates)
    lengths = [0] * len(rates)
    for depth in range(1, max(most, default=0) + 1):
        for index, (rate, count) in enumerate(zip(rates, most, strict=True)):
            if depth <= count and rate**depth >= _LEAST_GAIN:
                gained[index] += rate**depth
                lengths[index] = depth
        seconds = cost.of(num_reqs + sum(lengths)) + depth * pass_seconds
        worth = (num_reqs + sum(gained)) / seconds
        if worth > best_worth:
            best, best_worth = lengths.copy(), worth
    return best
