"""Drafts as the scheduler sees them: which a request may have, what became of them."""

from __future__ import annotations

from typing import Any

from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.contracts.seams import GrammarManager
from tokenmill.core.grammar import cut_drafts
from tokenmill.core.request import Request
from tokenmill.core.step import Step


class Drafting:
    """Takes drafts in, and counts those that were checked."""

    def __init__(self, num_speculative_tokens: int, grammars: GrammarManager) -> None:
        self._most = num_speculative_tokens
        self._grammars = grammars
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted = [0] * num_speculative_tokens

    def counts(self) -> dict[str, Any]:
        """Fields of `SchedulerStats`."""
        return {
            "num_drafts": self._num_drafts,
            "num_draft_tokens": self._num_draft_tokens,
            "num_accepted_tokens_per_pos": self._num_accepted.copy(),
        }

    def holds(self, request: Request) -> bool:
        """Whether a request with a result in flight waits for it: it may bring drafts, or tokens
        that need no step each.
        """
        return self._most > 0 or request.holds_for_forced

    def leave_room(self, request: Request, num_others: int, step: Step) -> None:
        """Cut a request's drafts, so that `num_others` that come after it get a token each."""
        if request.draft_token_ids:
            num_known = request.num_expected_tokens - request.num_computed_tokens
            room = step.token_budget - num_others - num_known
            del request.draft_token_ids[max(room, 0) :]

    def settle(self, request: Request, num_due: int, num_sampled: int) -> None:
        """Of `num_due` tokens that a step might have brought it brought `num_sampled`."""
        num_drafted = num_due - 1
        if num_drafted <= 0:
            return
        self._num_drafts += 1
        self._num_draft_tokens += num_drafted
        request.num_draft_tokens += num_drafted
        request.num_accepted_tokens += num_sampled - 1
        for place in range(num_sampled - 1):
            self._num_accepted[place] += 1

    def take(self, request: Request, result: ModelRunnerOutput) -> None:
        """Have the next step check what was proposed beside a request's tokens."""
        drafts = result.draft_token_ids.get(request.request_id)
        if drafts:
            request.draft_token_ids = drafts[: self._most]
            if request.is_structured:
                cut_drafts(request, self._grammars)
