"""A request inside the scheduler: a state machine and its counters.

    add_request -> WAITING --> RUNNING --> FINISHED_*
                                 |  ^
                                 v  |
                              PREEMPTED

Every live state may also end directly. A waiting or preempted request may carry a `wait_reason`.

The counters of a running request, on the line of its tokens:

    0        num_settled     num_computed
    |  settled  |  in flight  |  pending  |
    |  prompt and outputs known   | placeholders | drafts |
                            num_tokens

`num_computed_tokens` moves when a step is planned, `num_settled_tokens` when its result is back.
"""

from __future__ import annotations

import enum
from typing import Any

from tokenmill.contracts.request import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    TokenLogprobs,
)


class RequestStatus(enum.IntEnum):
    """Where a request stands; all values from `FINISHED_STOPPED` on are final."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6
    FINISHED_REPETITION = 7


_RUNNING = RequestStatus.RUNNING
FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}

_FINAL = frozenset(FINISH_REASONS)
_LEGAL_TRANSITIONS = {
    RequestStatus.WAITING: _FINAL | {RequestStatus.RUNNING},
    RequestStatus.RUNNING: _FINAL | {RequestStatus.PREEMPTED},
    RequestStatus.PREEMPTED: _FINAL | {RequestStatus.RUNNING},
}


class Request:
    """One request, changed by the scheduler only.

    `max_total_tokens` is the longest sequence the engine can hold: `max_tokens` is cut to it, so
    that a request which outgrows the context or the whole KV pool ends with `length` like any
    other. `min_tokens` never exceeds `max_tokens`, so every request ends.
    """

    __slots__ = (
        "all_token_ids",
        "block_hashes",
        "data",
        "draft_token_ids",
        "embeds_end",
        "end_token_ids",
        "first_scheduled_time",
        "holds_for_forced",
        "is_plain",
        "is_pooling",
        "is_structured",
        "kv_transfer_params",
        "max_num_tokens",
        "max_tokens",
        "min_tokens",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_external_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_settled_tokens",
        "num_slots",
        "num_steps_in_flight",
        "num_unsent_tokens",
        "num_untold_tokens",
        "pending_prompt_logprobs",
        "reads_prefix_cache",
        "repetition_detection",
        "request_id",
        "row",
        "sort_key",
        "status",
        "stop_token_ids",
        "wait_reason",
    )

    def __init__(self, data: EngineCoreRequest, *, max_total_tokens: int) -> None:
        self.data = data
        self.request_id = data.request_id
        self.sort_key = (data.priority, data.arrival_time, data.request_id)
        """Rank under the priority policy; the smallest is first."""
        self.num_prompt_tokens = len(data.prompt_token_ids)
        self._set_kind()
        self._set_ends(max_total_tokens)
        self.repetition_detection = data.sampling_params.repetition_detection
        self.reads_prefix_cache = not data.sampling_params.skip_reading_prefix_cache

        self.status = RequestStatus.WAITING
        self.wait_reason: str | None = None
        """Why it may not start yet, in the words of the rule that holds it back."""
        self.row: int | None = None
        """Its place in the workers' tables; None unless it runs."""

        self.all_token_ids = [*data.prompt_token_ids, *data.initial_output_ids]
        """Prompt and confirmed output."""
        self.block_hashes: list[bytes] = []
        """Of the full blocks of `all_token_ids`, extended by the KV cache manager when it needs
        them and kept for life: a preempted request is not hashed again."""
        self.draft_token_ids: list[int] = []
        """Guesses at the next tokens, to be checked by the next step."""
        self.num_draft_tokens = self.num_accepted_tokens = 0
        """Drafts that steps have checked, and those of them that held."""

        self.num_unsent_tokens = 0
        """Of the last tokens known, those that no output has told yet: forced at the start."""
        self.num_untold_tokens = 0
        """Of the last tokens known, those that the workers have not been told: forced ones."""
        self.holds_for_forced = False
        """Whether more tokens will be forced once what is in flight has settled."""

        self.num_computed_tokens = 0
        """Tokens whose KV is computed, or will be by the steps in flight."""
        self.num_settled_tokens = 0
        """Tokens whose KV is known to be there."""
        self.num_slots = 0
        """Of its block tables: so many tokens fit. Kept by the KV cache manager."""
        self.num_output_placeholders = 0
        """Tokens that the steps in flight will bring at most."""
        self.num_steps_in_flight = 0

        self.num_cached_tokens = 0
        """Tokens found in the prefix cache when it was first admitted."""
        self.num_external_tokens = 0
        """Of them, those that were brought there from outside for it."""
        self.kv_transfer_params: dict[str, Any] | None = None
        """Where another engine finds the KV of its prompt; set when it has ended."""
        self.num_preemptions = 0
        self.first_scheduled_time: float | None = None
        asked = data.sampling_params.prompt_logprobs is not None
        self.pending_prompt_logprobs: list[TokenLogprobs] | None = [] if asked else None
        """Prompt log-probabilities so far; None if none are owed (any more)."""

    def _set_kind(self) -> None:
        data = self.data
        self.is_pooling = data.pooling is not None
        """Whether it ends at its prompt."""
        self.is_structured = data.sampling_params.structured_outputs is not None
        """Whether a grammar restricts its output."""
        self.embeds_end = max((each.embeds_end for each in data.mm_features), default=0)
        """Of its prompt, the position behind the last token whose embedding an encoder makes."""
        self.is_plain = not (self.is_pooling or self.is_structured or self.embeds_end)
        """Whether it samples tokens, no others are put among them, and no encoder is needed (any
        more: `EncoderSchedule` keeps it)."""

    def _set_ends(self, max_total_tokens: int) -> None:
        self.max_tokens = min(self.data.max_tokens, max_total_tokens - self.num_prompt_tokens)
        if self.is_pooling:
            self.max_tokens = 1  # it never comes; a prompt may fill the whole context
        self.max_num_tokens = self.num_prompt_tokens + self.max_tokens
        """With its prompt."""
        self.min_tokens = min(self.data.sampling_params.min_tokens, self.max_tokens)
        self.stop_token_ids = frozenset(self.data.stop_token_ids)
        self.end_token_ids = self.stop_token_ids | {self.data.eos_token_id}
        """All that may end it."""

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and confirmed output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Confirmed output, `initial_output_ids` included."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def num_expected_tokens(self) -> int:
        """Tokens known, and those that the steps in flight will bring at most."""
        return len(self.all_token_ids) + self.num_output_placeholders

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to compute: known, expected and drafted ones.

        The last token a request may generate is never computed. So a request that will surely
        reach `max_tokens` in flight has nothing pending, and no draft goes beyond the end.
        """
        wanted = self.num_expected_tokens + len(self.draft_token_ids)
        return min(wanted, self.max_num_tokens - 1) - self.num_computed_tokens

    @property
    def decodes(self) -> bool:
        """Whether all but the last of its tokens are computed: each step can bring the next one."""
        return self.num_computed_tokens >= self.num_expected_tokens - 1

    @property
    def owes_prompt_logits(self) -> bool:
        """Whether the next chunk's logits predict prompt tokens that somebody asked for."""
        return (
            self.pending_prompt_logprobs is not None
            and self.num_computed_tokens < self.num_prompt_tokens - 1
        )

    @property
    def is_running(self) -> bool:
        return self.status is _RUNNING

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it lives."""
        return FINISH_REASONS[self.status] if self.is_finished else None

    def transition(self, status: RequestStatus) -> None:
        """Move to `status`; the drawing at the top says which moves are legal."""
        legal = _LEGAL_TRANSITIONS.get(self.status, frozenset())
        assert status in legal, f"{self.request_id}: {self.status.name} -> {status.name}"
        self.status = status
        self.wait_reason = None

    def start(self, row: int, num_cached_tokens: int) -> None:
        """Enter `row` with the KV of the first `num_cached_tokens` tokens found in the cache."""
        self.transition(RequestStatus.RUNNING)
        self.row = row
        self.num_computed_tokens = num_cached_tokens
        self.num_settled_tokens = num_cached_tokens
        if self.pending_prompt_logprobs:
            self.pending_prompt_logprobs = []  # a preempted prompt is computed from its start

    def settle(self, num_scheduled: int, num_due: int, num_sampled: int) -> None:
        """A step is back: of `num_due` tokens it might have brought it brought `num_sampled`.

        The others were rejected drafts, and so is their KV.
        """
        num_rejected = num_due - num_sampled
        self.num_computed_tokens -= num_rejected
        self.num_output_placeholders -= num_due
        self.num_settled_tokens += num_scheduled - num_rejected

    def preempt(self) -> None:
        """Give everything back but the tokens. Output in flight is still to come and counts."""
        self.transition(RequestStatus.PREEMPTED)
        self.num_preemptions += 1
        self.num_computed_tokens = 0
        self.num_settled_tokens = 0
        self.num_output_placeholders = 0
        self.draft_token_ids = []
        self.num_untold_tokens = 0  # it resumes with all its tokens
        self.holds_for_forced = False

    def take_prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """The prompt's log-probabilities, once, if they were asked for."""
        logprobs, self.pending_prompt_logprobs = self.pending_prompt_logprobs, None
        return logprobs

    def make_output(
        self, new_token_ids: list[int] | None = None, stop_reason: int | None = None
    ) -> EngineCoreOutput:
        """How the request stands, with tokens that are new."""
        return EngineCoreOutput(
            request_id=self.request_id,
            new_token_ids=new_token_ids or [],
            finish_reason=None if self.status is _RUNNING else self.finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=self.num_cached_tokens,
            num_external_tokens=self.num_external_tokens,
            first_scheduled_time=self.first_scheduled_time,
            num_preemptions=self.num_preemptions,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            kv_transfer_params=self.kv_transfer_params,
        )
