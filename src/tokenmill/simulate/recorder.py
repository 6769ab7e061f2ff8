"""What requests have met, as far as a report needs it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tokenmill.contracts.request import FinishReason
from tokenmill.observe.spread import Histogram
from tokenmill.simulate.requests import SimulatedRequest


def _seconds() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Recorder:
    """Figures of ended requests, in the order of their ends; seconds."""

    goals: Mapping[str, float] = field(default_factory=dict)
    """Limits in milliseconds, of `config.goals`."""
    ttft: array[float] = field(default_factory=_seconds)
    """Of requests that have a token."""
    tpot: array[float] = field(default_factory=_seconds)
    """Of requests that have several."""
    e2el: array[float] = field(default_factory=_seconds)
    queue: array[float] = field(default_factory=_seconds)
    """From a request's coming to its first step."""
    ttft_of: dict[int, array[float]] = field(default_factory=dict)
    """By priority."""
    gaps: Histogram = field(default_factory=Histogram)
    """Between a request's pieces of text."""
    num_completed: int = 0
    num_aborted: int = 0
    """By their deadlines."""
    num_refused: int = 0
    num_good: int = 0
    """Completed, and within all goals."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    last_end: float = 0.0

    def add(self, request: SimulatedRequest, num_tokens: int, now: float) -> None:
        """A step has brought a request some tokens."""
        if request.first is None:
            request.first = now
        else:
            self.gaps.add(now - request.last)
        request.last = now
        request.num_output += num_tokens

    def add_steady(self, requests: Sequence[SimulatedRequest], times: Sequence[float]) -> None:
        """Each of the requests has got a token at each of these times."""
        for request in requests:
            if request.first is None:
                request.first = times[0]
            else:
                self.gaps.add(times[0] - request.last)
            request.last = times[-1]
            request.num_output += len(times)
        for before, after in pairwise(times):
            self.gaps.add(after - before, len(requests))

    def end(self, request: SimulatedRequest, now: float) -> None:
        """A request has ended."""
        self.last_end = now
        self.num_prompt_tokens += len(request.prompt)
        self.num_cached_tokens += request.num_cached
        self.num_output_tokens += request.num_output
        self.num_preemptions += request.num_preemptions
        if request.scheduled is not None:
            self.queue.append(request.scheduled - request.arrival)
        if request.first is None:
            self.num_aborted += 1
            return
        figures = {"ttft": request.first - request.arrival, "e2el": now - request.arrival}
        self.ttft.append(figures["ttft"])
        self.ttft_of.setdefault(request.priority, _seconds()).append(figures["ttft"])
        if request.finish_reason is not FinishReason.LENGTH:
            self.num_aborted += 1
            return
        num_later = request.num_output - 1
        figures["tpot"] = (now - request.first) / num_later if num_later else 0.0
        if num_later:
            self.tpot.append(figures["tpot"])
        self.e2el.append(figures["e2el"])
        self.num_completed += 1
        self.num_good += all(1e3 * figures[goal] <= limit for goal, limit in self.goals.items())
