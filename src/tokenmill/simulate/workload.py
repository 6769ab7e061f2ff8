"""Which requests come, when, and what their prompts share.

prompt of a first turn    | shared prefix | own tokens |
of the next one           | shared prefix | own tokens | answer | more tokens |
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Protocol

from tokenmill.simulate.options import SimulateOptions
from tokenmill.simulate.requests import SAMPLED, SimulatedRequest, part

PREFIX_MARK = 1 << 30
"""Marks of shared prefixes begin here; those of requests' own parts are below."""
OWN_MARK = 16
"""And those begin here."""

Lengths = Sequence[tuple[int, int]]
"""(prompt, answer) in tokens."""


class Workload(Protocol):
    """Requests from outside, and those that follow from answers."""

    def arrivals(self) -> Iterator[SimulatedRequest]:
        """In the order of their times."""
        ...

    def following(self, request: SimulatedRequest, now: float) -> SimulatedRequest | None:
        """The next of its session, now that the request is answered; None if there is none."""
        ...


class RandomWorkload:
    """As the options say; the same for the same options.

    `lengths` of real conversations stand in for drawn ones. A session whose next prompt would leave
    no room for an answer within `max_model_len` ends.
    """

    def __init__(
        self, options: SimulateOptions, max_model_len: int, lengths: Lengths | None = None
    ) -> None:
        self._options = options
        self._max_model_len = max_model_len
        self._lengths = lengths
        self._times = random.Random(f"times {options.seed}")
        weights = options.priority_weights()
        self._priorities, self._weights = list(weights), list(weights.values())

    def arrivals(self) -> Iterator[SimulatedRequest]:
        options, now = self._options, 0.0
        for number in range(0, options.num_requests, options.turns):
            draw = self._draws_of(number)
            mark = PREFIX_MARK + draw.randrange(options.num_prefixes)
            turns = min(options.turns, options.num_requests - number)
            yield self._make(number, draw, now, part(mark, options.prefix_len), turns - 1)
            now += self._gap()

    def following(self, request: SimulatedRequest, now: float) -> SimulatedRequest | None:
        if not request.turns_left:
            return None
        number, draw = request.number + 1, self._draws_of(request.number + 1)
        history = request.prompt + [SAMPLED] * request.num_output
        arrival = now + draw.expovariate(1.0) * self._options.think_seconds
        following = self._make(number, draw, arrival, history, request.turns_left - 1)
        following.priority = request.priority
        fits = len(following.prompt) + following.output_len <= self._max_model_len
        return following if fits else None

    def _draws_of(self, number: int) -> random.Random:
        """What is drawn for one request: whenever it comes, it is the same."""
        return random.Random(f"request {self._options.seed} {number}")

    def _make(
        self, number: int, draw: random.Random, arrival: float, before: list[int], turns_left: int
    ) -> SimulatedRequest:
        options = self._options
        if self._lengths is None:
            input_len = _draw_length(draw, options.input_len, options.length_cv)
            output_len = _draw_length(draw, options.output_len, options.length_cv)
            # What is drawn from a long tail is cut to what fits, as servers ask of their clients.
            room = max(self._max_model_len - len(before), 2)
            input_len = min(input_len, room - 1)
            output_len = min(output_len, room - input_len)
        else:
            input_len, output_len = draw.choice(self._lengths)
        return SimulatedRequest(
            number=number,
            arrival=arrival,
            prompt=before + part(OWN_MARK + number, input_len),
            output_len=output_len,
            priority=draw.choices(self._priorities, self._weights)[0],
            deadline=None if options.deadline is None else arrival + options.deadline,
            turns_left=turns_left,
        )

    def _gap(self) -> float:
        """Seconds between two sessions."""
        options = self._options
        if math.isinf(options.request_rate):
            return 0.0
        mean = options.turns / options.request_rate
        if options.burstiness == 0:
            return mean
        shape = 1.0 / options.burstiness**2
        return self._times.gammavariate(shape, mean / shape)


def _draw_length(draw: random.Random, mean: int, cv: float) -> int:
    if cv == 0:
        return mean
    sigma = math.sqrt(math.log1p(cv * cv))
    return max(round(draw.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)), 1)
