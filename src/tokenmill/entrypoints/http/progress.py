"""Counts and times of one prompt's generation, as its outputs come."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from tokenmill.entrypoints.http.replies import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Timings,
    Usage,
)
from tokenmill.entrypoints.parsers.reasoning import ReasoningCounter
from tokenmill.outputs import RequestOutput
from tokenmill.sampling_params import SamplingParams
from tokenmill.tokenizer.reasoning import ReasoningMarkers


class Progress:
    """Times are on the monotonic clock, in seconds."""

    __slots__ = (
        "arrival_time",
        "data_parallel_rank",
        "finish_reasons",
        "first_scheduled_time",
        "first_token_time",
        "hides_output",
        "last_token_time",
        "num_cached_tokens",
        "num_external_tokens",
        "num_output_tokens",
        "num_prompt_tokens",
        "params",
        "previous_token_time",
        "reasoning",
    )

    def __init__(self, params: SamplingParams, *, hides_output: bool = False) -> None:
        """`hides_output`: a token is generated that the client did not ask for."""
        self.params = params
        self.hides_output = hides_output
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        """Of all `n` sequences."""
        self.num_cached_tokens = self.num_external_tokens = 0
        self.data_parallel_rank = 0
        """The replica that computes it."""
        self.arrival_time: float | None = None
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.previous_token_time: float | None = None
        """`last_token_time` before the latest output."""
        self.finish_reasons: list[str] = []
        """Of the sequences that have finished."""
        self.reasoning: ReasoningTally | None = None
        """Counts tokens of reasoning, if somebody wants to know."""

    def update(self, output: RequestOutput) -> int:
        """Take in a delta, or the one final output; how many tokens it brings."""
        metrics = output.metrics
        num_new = 0
        for sequence in output.outputs:
            num_new += len(sequence.token_ids)
            if self.reasoning is not None:
                self.reasoning.update(sequence.index, sequence.token_ids)
            if sequence.finish_reason is not None:
                self.finish_reasons.append(sequence.finish_reason)
        self.num_output_tokens += num_new
        if self.first_token_time is None:
            self.arrival_time = metrics.arrival_time
            self.first_scheduled_time = metrics.first_scheduled_time
            self.first_token_time = metrics.first_token_time
            self.num_cached_tokens = output.num_cached_tokens
            self.num_external_tokens = output.num_external_tokens
            self.data_parallel_rank = output.data_parallel_rank
        self.previous_token_time = self.last_token_time
        self.last_token_time = metrics.last_token_time
        return num_new


class ReasoningTally:
    """Tokens of reasoning in all sequences of a prompt."""

    def __init__(self, markers: ReasoningMarkers, is_open: bool | None) -> None:
        """`is_open`: whether answers begin within the reasoning; None if they decide that."""
        self._markers = markers
        self._is_open = is_open
        self._counters: dict[int, ReasoningCounter] = {}

    def update(self, index: int, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of sequence `index`."""
        counter = self._counters.get(index)
        if counter is None:
            counter = ReasoningCounter(self._markers, self._is_open)
            self._counters[index] = counter
        counter.update(token_ids)

    @property
    def count(self) -> int:
        """So far."""
        return sum(counter.count for counter in self._counters.values())


def usage_of(parts: Sequence[Progress], *, details: bool) -> Usage:
    """Counts over all prompts of a request; `details` adds the cached ones."""
    num_prompt = sum(part.num_prompt_tokens for part in parts)
    num_output = sum(0 if part.hides_output else part.num_output_tokens for part in parts)
    num_cached = sum(part.num_cached_tokens for part in parts)
    tallies = [part.reasoning for part in parts if part.reasoning is not None]
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=PromptTokensDetails(num_cached) if details else UNSET,
        completion_tokens_details=CompletionTokensDetails(sum(tally.count for tally in tallies))
        if tallies
        else UNSET,
    )


def timings_of(parts: Sequence[Progress], *, details: bool) -> Timings:
    """Times over all prompts of a request: from the first of the first to the last of the last."""
    arrival = min((p.arrival_time for p in parts if p.arrival_time is not None), default=None)
    scheduled = min(
        (p.first_scheduled_time for p in parts if p.first_scheduled_time is not None), default=None
    )
    first = min((p.first_token_time for p in parts if p.first_token_time is not None), default=None)
    last = max((p.last_token_time for p in parts if p.last_token_time is not None), default=None)
    usage = usage_of(parts, details=False)
    prompt_ms, predicted_ms = _ms(scheduled, first), _ms(first, last)
    num_cached = sum(part.num_cached_tokens for part in parts)
    num_later = usage.completion_tokens - sum(len(part.finish_reasons) or 1 for part in parts)
    return Timings(
        queued_ms=_ms(arrival, scheduled),
        prompt_n=usage.prompt_tokens,
        prompt_ms=prompt_ms,
        prompt_per_second=_rate(usage.prompt_tokens - num_cached, prompt_ms),
        predicted_n=usage.completion_tokens,
        predicted_ms=predicted_ms,
        predicted_per_second=_rate(num_later, predicted_ms),
        cache_n=num_cached if details else None,
    )


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(1e3 * (end - start), 3)


def _rate(count: int, ms: float | None) -> float | None:
    return round(1e3 * count / ms, 3) if ms and count > 0 else None
