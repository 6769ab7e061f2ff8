"""How often drafts hold, from those that were made.

A guess is compared with what was sampled whether or not a step has checked it: that costs nothing,
and it is how a request whose guesses were bad gets another chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_MEMORY = 0.92
"""What a request's latest guess leaves of the weight of those before."""
_KIND_MEMORY = 0.995
_IDLE_MEMORY = 0.97
"""The same of a turn without a guess, where making one has its price."""
_PRIOR_RATE = 0.6
"""Of a kind that nothing is known about."""
_PRIOR_WEIGHT = 2.0
"""How many drafts of its own a request must have for them to count as much as all others'."""


@dataclass(slots=True)
class _Rate:
    """Drafts that held and drafts tried, the latest ones most."""

    num_held: float = 0.0
    num_tried: float = 0.0

    def add(self, num_held: int, num_tried: int, memory: float) -> None:
        self.num_held = memory * self.num_held + num_held
        self.num_tried = memory * self.num_tried + num_tried

    def mean(self, prior: float) -> float:
        """Between what was seen and `prior`, as much as was seen."""
        return (self.num_held + _PRIOR_WEIGHT * prior) / (self.num_tried + _PRIOR_WEIGHT)


@dataclass(slots=True)
class _Guess:
    """What a row was last expected to go on with."""

    rate: _Rate = field(default_factory=_Rate)
    token_ids: Sequence[int] = ()
    kind: int = 0
    start: int = 0
    """Where in the sequence the guess begins."""


class Acceptance:
    """Of every row of the workers' tables, for guesses of some kinds.

    A kind is what a drafter knows about a guess beforehand, such as how much of the text it
    matches; 0 to `num_kinds` - 1.
    """

    def __init__(self, num_rows: int, num_kinds: int = 1) -> None:
        self._rows = [_Guess() for _ in range(num_rows)]
        self._kinds = [_Rate() for _ in range(num_kinds)]

    def clear(self, row: int) -> None:
        """Another request has entered the row."""
        self._rows[row] = _Guess()

    def expect(self, row: int, start: int, token_ids: Sequence[int], kind: int = 0) -> None:
        """Remember a guess of the tokens from place `start` on."""
        guess = self._rows[row]
        guess.token_ids, guess.start, guess.kind = token_ids, start, kind

    def observe(self, row: int, token_ids: npt.NDArray[np.int32], num_tokens: int) -> int:
        """Compare the last guess with the `num_tokens` tokens that are known of the row now.

        Returns how many of its tokens hold.
        """
        guess = self._rows[row]
        if not guess.token_ids:
            return 0
        came = token_ids[guess.start : min(guess.start + len(guess.token_ids), num_tokens)]
        num_held = 0
        for token_id, guessed in zip(came.tolist(), guess.token_ids, strict=False):
            if token_id != guessed:
                break
            num_held += 1
        num_tried = min(num_held + 1, len(came))
        guess.rate.add(num_held, num_tried, _MEMORY)
        self._kinds[guess.kind].add(num_held, num_tried, _KIND_MEMORY)
        guess.token_ids = ()
        return num_held

    def forget_slowly(self, row: int, kind: int = 0) -> None:
        """A turn without a guess: what was seen counts less, so that there is another some time."""
        for rate in (self._rows[row].rate, self._kinds[kind]):
            rate.add(0, 0, _IDLE_MEMORY)

    def rate(self, row: int, kind: int = 0) -> float:
        """How likely a draft of the row holds if those before it do, 0 to 1."""
        return self._rows[row].rate.mean(self._kinds[kind].mean(_PRIOR_RATE))
