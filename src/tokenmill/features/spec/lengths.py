"""How many drafts are worth their time.

A step of n tokens takes about a + b * n seconds: reading the weights, and computing. A draft brings
a token with the probability that it and those before it hold. So it is worth its b seconds if that
is more than the step brings a second without it. With one request a is most of a step, and many
drafts are worth their time; with many requests it is not, and hardly any draft is. What a and b are
is measured, since they depend on the machine, the model, its weights and the contexts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_LEAST_GAIN = 0.05
"""A draft that holds less often is never worth the trouble."""
_MEMORY = 0.9
_MOST_WEIGHT = 20
"""A mean of so many steps is as good as any: later ones replace earlier ones."""
_FIT_EVERY = 8
"""Steps between two fits of the line."""
_FIRST_PLAIN = 3
_PLAIN_EVERY = 64
"""Steps without drafts: so many at first, and then one in so many, or there is nothing to compare
with.
"""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step by its tokens: `base + per_token * num_tokens`."""

    base: float
    per_token: float

    def of(self, num_tokens: float) -> float:
        return self.base + self.per_token * num_tokens


FREE_DRAFTS = StepCost(base=1.0, per_token=0.0)
"""As long as nothing is known: the first drafts show what drafts cost."""


class StepTimer:
    """Measures steps, and fits a line through what those of each size take."""

    def __init__(self, largest: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Only steps in which no request has more than `largest` tokens count: prompts are
        computed in larger ones.
        """
        self.cost = FREE_DRAFTS
        self._largest = largest
        self._clock = clock
        self._num_tokens = 0
        self._begun = 0.0
        self._means: dict[int, list[float]] = {}
        """Number of tokens to the mean of its seconds, and how many steps that is of."""
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
        if not self._num_tokens:
            return
        seconds = self._clock() - self._begun
        mean = self._means.setdefault(self._num_tokens, [seconds, 0.0])
        weight = 1.0 - _MEMORY if mean[1] >= 1.0 / (1.0 - _MEMORY) else 1.0 / (mean[1] + 1.0)
        # A step that something else has held up says little.
        mean[0] += weight * (min(seconds, 3.0 * mean[0]) - mean[0])
        mean[1] = min(mean[1] + 1.0, _MOST_WEIGHT)
        self._num_tokens = 0
        self._num_steps += 1
        self._num_plain += self._is_plain
        self._num_since_plain = 0 if self._is_plain else self._num_since_plain + 1
        if len(self._means) > 1 and (self._num_steps % _FIT_EVERY == 0 or mean[1] == 1.0):
            self.cost = self._fit()

    def _fit(self) -> StepCost:
        """The line with the least squares; it neither falls nor begins below 0."""
        total = sum(weight for _, weight in self._means.values())
        mean_tokens = sum(n * weight for n, (_, weight) in self._means.items()) / total
        mean_seconds = sum(seconds * weight for seconds, weight in self._means.values()) / total
        variance = covariance = 0.0
        for num_tokens, (seconds, weight) in self._means.items():
            away = num_tokens - mean_tokens
            variance += weight * away * away
            covariance += weight * away * (seconds - mean_seconds)
        slope = min(max(covariance / variance, 0.0), mean_seconds / mean_tokens)
        return StepCost(mean_seconds - slope * mean_tokens, slope)


def choose_lengths(
    rates: Sequence[float], most: Sequence[int], num_reqs: int, cost: StepCost
) -> list[int]:
    """How many drafts each request should have, so that the next step brings the most a second.

    A draft of request i holds with probability rates[i] if those before it do; it may have at most
    most[i]. The step has `num_reqs` requests in all, with a token each besides.
    """
    lengths = [0] * len(rates)
    gains = sorted(
        (
            (rate**place, index)
            for index, (rate, count) in enumerate(zip(rates, most, strict=True))
            for place in range(1, count + 1)
        ),
        reverse=True,
    )
    num_new, seconds = float(num_reqs), cost.of(num_reqs)
    for gain, index in gains:  # a request's own come in their order, as gains fall
        if gain < _LEAST_GAIN or gain * seconds < cost.per_token * num_new:
            break
        lengths[index] += 1
        num_new += gain
        seconds += cost.per_token
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
    best_worth = num_reqs / cost.of(num_reqs)
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
