"""How many sequences the server takes on, counted before any text is rendered or tokenized.

The engine has the same limit, and one on tokens; it counts a request only when its ids are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from tokenmill.errors import InvalidRequestError, QueueFullError

MAX_RETRY_SECONDS = 60
"""Clients give up on longer waits (the openai client at 120 s)."""
_SMOOTHING = 0.1
"""Weight of the newest duration in their average."""


class Admission:
    """Counts what is in the server. Used by the event loop only."""

    def __init__(self, *, max_running: int, max_queue: int) -> None:
        """So many sequences may run, and so many wait."""
        self.max_sequences = max_running + max_queue
        self.num_sequences = 0
        self.num_refused = 0
        self._seconds = 1.0

    @contextmanager
    def entered(self, num_sequences: int, parameter: str) -> Iterator[None]:
        """Take on a request of so many sequences, which `parameter` asks for; in the block it is
        here.

        Raises `InvalidRequestError` if it could never be taken on, `QueueFullError` if not now.
        """
        if num_sequences > self.max_sequences:
            raise InvalidRequestError(
                f"{parameter} asks for {num_sequences} sequences at once, but this server holds"
                f" {self.max_sequences} (max_num_seqs and max_queue); send fewer at a time.",
                parameter=parameter,
            )
        if self.num_sequences + num_sequences > self.max_sequences:
            self.num_refused += 1
            seconds = min(max(math.ceil(self._seconds), 1), MAX_RETRY_SECONDS)
            raise QueueFullError(
                f"the server holds {self.num_sequences} sequences of at most"
                f" {self.max_sequences}; try again in {seconds} s.",
                retry_after=seconds,
            )
        self.num_sequences += num_sequences
        try:
            yield
        finally:
            self.num_sequences -= num_sequences

    def finished(self, seconds: float) -> None:
        """A request took so long; later refusals tell their clients to wait about that long."""
        self._seconds += _SMOOTHING * (seconds - self._seconds)
