"""The request's state machine and its arithmetic."""

from __future__ import annotations

import pytest

from helpers.core import create_request
from tokenmill.contracts.request import FinishReason
from tokenmill.core.request import FINISH_REASONS, Request, RequestStatus

S = RequestStatus
LIVE = [S.WAITING, S.RUNNING, S.PREEMPTED]
PATHS = {S.WAITING: [], S.RUNNING: [S.RUNNING], S.PREEMPTED: [S.RUNNING, S.PREEMPTED]}
LEGAL = {(S.WAITING, S.RUNNING), (S.RUNNING, S.PREEMPTED), (S.PREEMPTED, S.RUNNING)}


def make(max_total_tokens=100, **kwargs):
    return Request(create_request(**kwargs), max_total_tokens=max_total_tokens)


@pytest.mark.parametrize("start", LIVE)
@pytest.mark.parametrize("end", list(S))
def test_only_legal_transitions(start, end):
    request = make()
    for status in PATHS[start]:
        request.transition(status)
    if end in FINISH_REASONS or (start, end) in LEGAL:
        request.transition(end)
        assert request.status is end
    else:
        with pytest.raises(AssertionError, match=f"{start.name} -> {end.name}"):
            request.transition(end)


@pytest.mark.parametrize("final", list(FINISH_REASONS))
def test_nothing_follows_an_end(final):
    request = make()
    request.transition(final)
    assert request.is_finished
    for status in S:
        with pytest.raises(AssertionError):
            request.transition(status)


def test_finish_reasons_are_the_words_users_see():
    assert [str(FINISH_REASONS[status]) for status in list(S)[3:]] == [
        "stop",
        "length",
        "abort",
        "error",
        "repetition",
    ]
    assert make().finish_reason is None
    assert FINISH_REASONS[S.FINISHED_ABORTED] is FinishReason.ABORT


def test_initial_output_counts_as_output():
    request = make(prompt=[5, 6, 7], initial_output_ids=[8, 9], max_tokens=4)
    assert (request.num_tokens, request.num_output_tokens) == (5, 2)
    assert request.num_pending_tokens == 5


@pytest.mark.parametrize(
    ("max_tokens", "longest", "limit"), [(4, 100, 4), (50, 20, 12), (12, 20, 12)]
)
def test_max_tokens_is_cut_to_the_longest_sequence(max_tokens, longest, limit):
    request = make(longest, prompt=8, max_tokens=max_tokens, min_tokens=max_tokens)
    assert request.max_tokens == request.min_tokens == limit


def test_pending_tokens_end_before_the_last_token():
    request = make(prompt=8, max_tokens=3)  # tokens 0..10; 0..9 are ever computed
    request.transition(S.RUNNING)
    assert request.num_pending_tokens == 8
    request.num_computed_tokens, request.num_output_placeholders = 8, 1
    request.draft_token_ids = [1, 2, 3, 4]
    assert request.num_pending_tokens == 2
    request.draft_token_ids, request.num_output_placeholders = [], 3
    request.num_computed_tokens = 10
    assert request.num_pending_tokens == 0
