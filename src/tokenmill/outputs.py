"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    """Natural logarithm of the probability under the raw distribution."""
    rank: int
    """1 for the most probable token; ties count against it."""
    decoded_token: str | None = None
    """Text of this token alone; empty while it is only part of a character."""


PositionLogprobs = dict[int, Logprob]
"""Token id to log-probability: the chosen token first, then the best ones in order."""


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
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`; None while it runs."""
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
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One entry per prompt token, None for the first, which nothing predicts."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
