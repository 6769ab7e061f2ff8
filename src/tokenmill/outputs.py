"""What a caller gets back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, overload

from tokenmill.lora_request import LoRARequest


@dataclass(slots=True)
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    """Natural logarithm of the probability under the raw distribution; `logprobs_mode` can have
    another number in its place."""
    rank: int
    """1 for the most probable token; ties count against it."""
    decoded_token: str | None = None
    """Text of this token alone; empty while it is only part of a character."""


PositionLogprobs = dict[int, Logprob]
"""Token id to log-probability: the chosen token first, then the best ones in order."""


class FlatLogprobs(Sequence[PositionLogprobs]):
    """Positions kept in a few long lists, where the garbage collector has nothing to visit.

    A position is made when it is looked at; that of a prompt's first token is empty. A slice is
    flat again.
    """

    def __init__(self, positions: Iterable[PositionLogprobs | None] = ()) -> None:
        self.start_indices: list[int] = []
        """Where each position begins in the lists below."""
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        self.decoded_tokens: list[str | None] = []
        self.extend(positions)

    def append(self, position: PositionLogprobs | None) -> None:
        """Add a position; None for a prompt's first token."""
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (position or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[PositionLogprobs | None]) -> None:
        """Add positions."""
        for position in positions:
            self.append(position)

    def __iadd__(self, positions: Iterable[PositionLogprobs | None]) -> Self:
        self.extend(positions)
        return self

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | FlatLogprobs:
        if isinstance(index, slice):
            return self._part(range(*index.indices(len(self))))
        part = slice(self.start_indices[index], self.end_indices[index])
        columns = zip(
            self.token_ids[part],
            self.logprobs[part],
            self.ranks[part],
            self.decoded_tokens[part],
            strict=True,
        )
        return {token_id: Logprob(logprob, rank, text) for token_id, logprob, rank, text in columns}

    def _part(self, indices: range) -> FlatLogprobs:
        if indices.step != 1 or not indices:
            return FlatLogprobs(self[index] for index in indices)
        which = slice(indices.start, indices.stop)
        begin, end = self.start_indices[indices.start], self.end_indices[indices.stop - 1]
        part = FlatLogprobs()
        part.start_indices = [index - begin for index in self.start_indices[which]]
        part.end_indices = [index - begin for index in self.end_indices[which]]
        part.token_ids = self.token_ids[begin:end]
        part.logprobs = self.logprobs[begin:end]
        part.ranks = self.ranks[begin:end]
        part.decoded_tokens = self.decoded_tokens[begin:end]
        return part

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FlatLogprobs):
            return NotImplemented
        return vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    """Which of the `n` sequences of the prompt."""
    text: str
    token_ids: list[int]
    """Every sampled token, including the one that stopped the sequence."""
    cumulative_logprob: float | None = None
    """Sum of the chosen tokens' log-probabilities; None unless `logprobs` was asked for."""
    logprobs: list[PositionLogprobs] | FlatLogprobs | None = None
    """One entry a token; flat with `flat_logprobs`."""
    finish_reason: str | None = None
    """`stop`, `length`, `repetition`, `abort` or `error`; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string or stop id that ended it; None for the model's end token."""
    error: str | None = None
    """What went wrong, if `finish_reason` is `error`."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request; seconds on the monotonic clock.

    Over all sequences that an output shows: the first of the first times, the last of the last.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    """Drafts that were checked (speculation), and of these, those that held."""
    num_accepted_tokens: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """The state of one prompt's generation: a snapshot, or a delta in `DELTA` mode."""

    request_id: str
    """The caller's id."""
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """All `n` sequences when the request has finished (`FINAL_ONLY`, and what `LLM.generate`
    returns); while it is streamed, the one sequence that has news."""
    finished: bool
    """Whether all sequences of the prompt have ended."""
    prompt_logprobs: list[PositionLogprobs | None] | FlatLogprobs | None = None
    """One entry per prompt token, None for the first, which nothing predicts."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    num_external_tokens: int = 0
    """Of these, tokens whose KV was loaded from outside the pool (see docs/kv-transfer.md)."""
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
    lora_request: LoRARequest | None = None
    """The adapter that it runs with."""
    data_parallel_rank: int = 0
    """The replica that computes it (`data_parallel_size`)."""
    kv_transfer_params: dict[str, Any] | None = None
    """What another engine needs to go on with the prompt's KV, where the request had
    `do_remote_decode`; with the last output (see docs/kv-transfer.md)."""
    pooled: Any = None
    """float32 [size], or [num_prompt_tokens, size]: the result of a pooling request, as an array of
    numpy; there are no tokens then."""
