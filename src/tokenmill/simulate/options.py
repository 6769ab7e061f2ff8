"""What may be set about a simulation; flags of `tokenmill simulate`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tokenmill.config.argument_types import at_least, one_of
from tokenmill.config.goals import parse_goals, parse_percentiles
from tokenmill.errors import ConfigError, shown

ROUTINGS = ("round_robin", "least_loaded", "prefix")
SEARCHES = ("rate", "workers")
_COUNTS = {
    "num_requests": 1, "input_len": 1, "output_len": 1, "prefix_len": 0, "num_prefixes": 1,
    "turns": 1, "num_workers": 1,
}  # fmt: skip
_NOT_NEGATIVE = ("burstiness", "length_cv", "think_seconds", "step_overhead", "request_overhead")
_POSITIVE = ("request_rate", "deadline", "bandwidth", "tflops", "memory", "chars_per_token")
_SHARES = ("acceptance", "goal_share")


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """A load, the workers that it meets, and what is asked of them. Raises `ConfigError`."""

    num_requests: int = 1000
    """Requests in all."""
    request_rate: float = 1.0
    """Requests a second, over all workers; inf sends all at once."""
    burstiness: float = 1.0
    """Coefficient of variation of the times between requests (gamma): 1 is Poisson, 0 is even."""
    input_len: int = 512
    """Mean tokens of a prompt, or of a turn, without what it shares."""
    output_len: int = 128
    """Mean tokens of an answer."""
    length_cv: float = 0.0
    """Coefficient of variation of both lengths (lognormal); 0 makes all alike, conversations as in
    ShareGPT have about 1."""
    sharegpt: str | None = None
    """A ShareGPT file (JSON): lengths of first turns and of their answers."""
    chars_per_token: float = 4.0
    """Characters of a token in that file."""
    trace: str | None = None
    """A file with one JSON object a line: time (s), input_len, output_len, and if wanted priority,
    deadline, prefix and prefix_len; or timestamp (ms), input_length, output_length, hash_ids."""
    prefix_len: int = 0
    """Tokens at the start of each prompt that it shares with others."""
    num_prefixes: int = 1
    """Different ones of these; each request begins with any of them."""
    turns: int = 1
    """Requests of a session: each one's prompt is all that was said before, and more."""
    think_seconds: float = 10.0
    """Mean pause between an answer and the session's next request (exponential)."""
    priorities: str | None = None
    """Priorities and how many requests have them: 0:1,5:3 gives three of four a 5. Smaller ones are
    earlier, with --scheduling-policy priority."""
    deadline: float | None = None
    """Seconds after which a request is aborted."""
    seed: int = 0
    """Of lengths, times and all else that is drawn."""

    num_workers: int = 1
    """Engines with the settings below, each with a machine of its own."""
    routing: str = "round_robin"
    """Which worker takes a request: round_robin, least_loaded, or prefix as the router does it."""

    bandwidth: float | None = None
    """GB/s that a step reads weights and KV with; measured here unless it or --step-times is given.
    """
    tflops: float | None = None
    """TFLOP/s that a step computes with; measured likewise."""
    memory: float | None = None
    """GB of a worker's memory; what is free here unless given."""
    step_overhead: float = 0.2
    """Milliseconds that each step takes beside reading and computing."""
    request_overhead: float = 5.0
    """Microseconds for each request in a step."""
    step_times: str | None = None
    """A file from `tokenmill bench throughput --step-times`: what steps take is fitted to it, in
    place of all these figures."""
    acceptance: float = 0.7
    """How likely a draft holds, with --spec-method."""

    goodput: str | None = None
    """Limits that a good request keeps, in milliseconds: ttft:500,tpot:50,e2el:10000."""
    goal_share: float = 0.99
    """Of the requests that have to keep them, for --search."""
    search: str | None = None
    """rate: the largest at which they do; workers: the fewest with which they do."""
    percentiles: str = "50,90,99"
    """Which to show, with commas."""

    def __post_init__(self) -> None:
        for name, least in _COUNTS.items():
            at_least(name, getattr(self, name), least)
        for name in _NOT_NEGATIVE:
            _check(name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "at least 0")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None:
                is_right = value > 0 and (name == "request_rate" or value < math.inf)
                _check(name, value, is_right, "more than 0")
        for name in _SHARES:
            _check(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "from 0 to 1")
        one_of("routing", self.routing, ROUTINGS)
        if self.search is not None:
            one_of("search", self.search, SEARCHES)
            if not self.goals():
                raise ConfigError(
                    f"search={self.search} needs goals: goodput='ttft:1000,tpot:100', say."
                )
            if self.trace is not None and self.search == "rate":
                raise ConfigError("search=rate cannot be used with a trace, which has its times.")
        if self.trace is not None and self.sharegpt is not None:
            raise ConfigError("trace and sharegpt both say how long requests are; give one.")
        self.goals()
        self.priority_weights()
        self.percents()

    def goals(self) -> Mapping[str, float]:
        """Figure to its limit in milliseconds."""
        return parse_goals(self.goodput)

    def percents(self) -> list[float]:
        """The percentiles to show."""
        return parse_percentiles(self.percentiles)

    def priority_weights(self) -> dict[int, float]:
        """Priority to how many requests have it, in any unit."""
        weights: dict[int, float] = {}
        for part in (self.priorities or "0:1").split(","):
            priority, _, weight = part.partition(":")
            try:
                weights[int(priority)] = float(weight)
            except ValueError:
                weights = {}
                break
        if not weights or not all(0 < weight < math.inf for weight in weights.values()):
            raise ConfigError(
                f"priorities={shown(self.priorities)} must be numbers and shares: 0:1,5:3."
            )
        return weights


def _check(name: str, value: float, is_right: bool, words: str) -> None:
    if not is_right:
        raise ConfigError(f"{name}={value} must be {words}.")
