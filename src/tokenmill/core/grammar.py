"""Requests whose text must have a form, as the scheduler sees them.

A request waits until its grammar is compiled. Each of its tokens moves the grammar on; tokens that
the grammar leaves no choice about are appended to it at once and computed with the next step's, as
one chunk. When nothing can follow any more the request ends, as if it had sampled an end token.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenmill.contracts.seams import GrammarManager
from tokenmill.core.request import Request, RequestStatus
from tokenmill.core.stop import Stop, append_tokens

_COMPLETE = Stop(RequestStatus.FINISHED_STOPPED)
_WORTH_HOLDING = 3
"""Forced tokens from which on a request leaves out a step to have them appended: less would take
as many steps."""


class GrammarReady:
    """A request starts once its grammar is compiled."""

    def __init__(self, grammars: GrammarManager) -> None:
        self._grammars = grammars

    def begin_pass(self, running: Mapping[str, Request]) -> None:
        """It is the same in every pass."""

    def wait_reason(self, request: Request) -> str | None:
        if not request.is_structured or self._grammars.is_ready(request.request_id):
            return None
        return "grammar"


def start_grammar(request: Request, grammars: GrammarManager) -> None:
    """Append what is forced at the start of the text; at least one token is left to sample."""
    if not request.is_structured or request.num_output_tokens > len(
        request.data.initial_output_ids
    ):
        return
    if request.repetition_detection is not None:  # it wants to see each token before the next
        return
    room = request.max_tokens - request.num_output_tokens - 1
    forced = grammars.start(request.request_id, room)
    request.all_token_ids += forced
    request.num_unsent_tokens += len(forced)


def follow_grammar(
    request: Request, grammars: GrammarManager, token_ids: list[int], stop: Stop | None
) -> tuple[list[int], Stop | None, str | None]:
    """Move the grammar on over tokens that were just appended.

    Returns all the new tokens, forced ones and those not yet told included, how they end the
    request, and why the request cannot go on, if it cannot.
    """
    by_length = stop is not None and stop.status is RequestStatus.FINISHED_LENGTH
    unsent = request.num_unsent_tokens
    if unsent:
        request.num_unsent_tokens = 0
        end = len(request.all_token_ids) - len(token_ids)
        sent = [*request.all_token_ids[end - unsent : end], *token_ids]
    else:
        sent = token_ids
    if stop is not None and not by_length:
        return sent, stop, None
    can_append = request.num_steps_in_flight == 0 and stop is None
    room = request.max_tokens - request.num_output_tokens if can_append else 0
    progress = grammars.advance(request.request_id, token_ids, room)
    if progress.error is not None:
        return sent, stop, f"The request's grammar cannot go on: {progress.error}."
    forced = progress.forced_token_ids
    if forced:
        request.draft_token_ids = []
        forced, stop = append_tokens(request, forced)
        if request.is_running:
            request.num_untold_tokens = len(forced)
        sent = sent + forced
    request.holds_for_forced = not can_append and progress.num_forced_left >= _WORTH_HOLDING
    return sent, _COMPLETE if progress.is_terminated else stop, None


def cut_drafts(request: Request, grammars: GrammarManager) -> None:
    """Keep the drafts that the grammar would not refuse; none beside forced tokens."""
    if request.num_untold_tokens:
        request.draft_token_ids = []
    else:
        request.draft_token_ids = grammars.cut_drafts(request.request_id, request.draft_token_ids)
