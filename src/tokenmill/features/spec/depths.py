"""How many drafts each request gets where they are made in passes, one for all requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tokenmill.features.spec.acceptance import Acceptance
from tokenmill.features.spec.lengths import StepTimer, choose_depth

_MEMORY = 0.9
_IDLE_MEMORY = 0.99


Agree = Callable[[list[int]], list[int]]
"""Numbers of the caller's choice -> those of the rank whose choice counts: what a clock says is
another thing on each of several ranks, and all must make the same passes."""


def alone(numbers: list[int]) -> list[int]:
    """There are no other ranks."""
    return numbers


class Depths:
    """Chooses by what steps and passes take, and by how often drafts hold."""

    def __init__(
        self,
        max_num_seqs: int,
        num_drafts: int,
        *,
        adaptive: bool = True,
        timer: StepTimer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        agree: Agree = alone,
    ) -> None:
        """At most `num_drafts` a request, and as many as may be unless `adaptive`."""
        self.timer = timer or StepTimer(largest=1 + num_drafts)
        self.acceptance = Acceptance(max_num_seqs)
        self._num_drafts = num_drafts
        self._adapts = adaptive
        self._clock = clock
        self._agree = agree
        self._pass_seconds = 0.0

    def choose(self, rows: Sequence[int], room: Sequence[int]) -> list[int]:
        """Drafts for each of these rows, for which there is so much room."""
        return self._agree(self._own_choice(rows, room))

    def _own_choice(self, rows: Sequence[int], room: Sequence[int]) -> list[int]:
        most = [max(min(self._num_drafts, each), 0) for each in room]
        lengths = most
        if self._adapts and self.timer.wants_plain:
            return [0] * len(rows)
        if self._adapts:
            rates = [self.acceptance.rate(row) for row in rows]
            lengths = choose_depth(rates, most, len(rows), self.timer.cost, self._pass_seconds)
        if not any(lengths):  # so that it is measured again some time
            self._pass_seconds *= _IDLE_MEMORY
        for row, length in zip(rows, lengths, strict=True):
            if not length:
                self.acceptance.forget_slowly(row)
        return lengths

    @contextmanager
    def timed(self) -> Iterator[list[int]]:
        """Measure the passes of a block, which appends to the list for each."""
        passes: list[int] = []
        begin = self._clock()
        yield passes
        if passes:
            seconds = (self._clock() - begin) / len(passes)
            known = self._pass_seconds or seconds
            self._pass_seconds = _MEMORY * known + (1 - _MEMORY) * min(seconds, 3 * known)
