"""How much may wait, and how long whoever is refused had better stay away."""

from __future__ import annotations

import time
from collections.abc import Callable

from tokenmill.errors import InvalidRequestError, QueueFullError

_SMOOTHING = 0.1
"""Weight of the latest gap between two ends in their mean."""
_RETRY_AFTER = (1.0, 60.0)
"""Shortest and longest advice in seconds."""


class QueueLimit:
    """Counts sequences and prompt tokens from the moment a request comes until it has ended."""

    def __init__(
        self,
        *,
        max_running: int,
        max_queue: int,
        max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_running = max_running
        self._max_queue = max_queue
        self._max_tokens = max_tokens
        self._clock = clock
        self._num_sequences = 0
        self._num_tokens = 0
        self._last_end: float | None = None
        self._mean_gap = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether no request is here."""
        return not self._num_sequences

    def enter(self, num_sequences: int) -> None:
        """Count a request's sequences in, before its prompt is tokenized.

        Raises `QueueFullError`, or `InvalidRequestError` if there could never be room.
        """
        limit = self._max_running + self._max_queue
        if num_sequences > limit:
            raise InvalidRequestError(
                f"n={num_sequences} sequences are more than the {limit} that may run and wait"
                f" here at the same time (max_num_seqs and max_queue); ask for fewer.",
                parameter="n",
            )
        if self._num_sequences + num_sequences > limit:
            raise self._full(
                f"{self._num_sequences} sequences run or wait, and {num_sequences} more would"
                f" exceed the limit of {limit} (max_num_seqs={self._max_running} and"
                f" max_queue={self._max_queue})"
            )
        self._num_sequences += num_sequences

    def enter_tokens(self, num_tokens: int) -> None:
        """Count a request's prompt tokens in, of all its sequences. Raises `QueueFullError`."""
        if self._num_tokens and self._num_tokens + num_tokens > self._max_tokens:
            raise self._full(
                f"the prompts of all requests have {self._num_tokens} tokens, and {num_tokens} more"
                f" would exceed the limit of {self._max_tokens} (max_queue_tokens)"
            )
        self._num_tokens += num_tokens

    def leave(self, num_sequences: int, num_tokens: int) -> None:
        """Count a request out."""
        self._num_sequences -= num_sequences
        self._num_tokens -= num_tokens

    def record_end(self, num_sequences: int) -> None:
        """A request has ended: so fast do places become free."""
        now = self._clock()
        if self._last_end is not None:
            gap = (now - self._last_end) / num_sequences
            self._mean_gap += _SMOOTHING * (gap - self._mean_gap)
        # The time until the next end says nothing if nobody is left.
        self._last_end = now if self._num_sequences else None

    def _full(self, why: str) -> QueueFullError:
        """The refusal, with the time in which those that wait now will have started."""
        num_waiting = max(self._num_sequences - self._max_running, 1)
        shortest, longest = _RETRY_AFTER
        retry_after = min(max(num_waiting * self._mean_gap, shortest), longest)
        return QueueFullError(
            f"The queue is full: {why}. Try again in {retry_after:.0f} s.", retry_after=retry_after
        )
