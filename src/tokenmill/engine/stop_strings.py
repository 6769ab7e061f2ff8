"""Stop strings, looked for in a text that grows.

Each stop string is matched by the algorithm of Knuth, Morris and Pratt (1977): a count of how many
of its first characters the text ends with. That count says where a match began, needs no second
look at old text, and is just what a stream must hold back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string found; positions count characters from the start of the text."""

    stop: str
    start: int
    end: int


class StopStringChecker:
    """Finds the stop string that is complete first; of several, the first in the list."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty strings; the list may be empty."""
        self._patterns = [(stop, _fallbacks(stop)) for stop in stops]
        self._matched = [0] * len(stops)
        self._num_chars = 0

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may yet turn out to begin a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str, *, honour: bool = True) -> StopMatch | None:
        """Add text; the match that it completes, if any, after which nothing more is to be added.

        With `honour=False` a stop string may begin in this text, but not end in it.
        """
        if not self._patterns:
            return None
        for char in text:
            self._num_chars += 1
            for i, (stop, fallbacks) in enumerate(self._patterns):
                matched = self._matched[i]
                while matched and stop[matched] != char:
                    matched = fallbacks[matched - 1]
                if stop[matched] == char:
                    matched += 1
                if matched == len(stop):
                    if honour:
                        return StopMatch(stop, self._num_chars - matched, self._num_chars)
                    matched = fallbacks[matched - 1]
                self._matched[i] = matched
        return None


def _fallbacks(stop: str) -> list[int]:
    """For each prefix: the length of the longest shorter one that it ends with."""
    fallbacks = [0] * len(stop)
    matched = 0
    for i in range(1, len(stop)):
        while matched and stop[matched] != stop[i]:
            matched = fallbacks[matched - 1]
        if stop[matched] == stop[i]:
            matched += 1
        fallbacks[i] = matched
    return fallbacks
