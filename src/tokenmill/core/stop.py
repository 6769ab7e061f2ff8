"""When a request ends, token by token, and what a result may not contain."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.core.request import Request, RequestStatus
from tokenmill.repetition import ends_with_repetition


@dataclass(frozen=True, slots=True)
class Stop:
    """How a request ends."""

    status: RequestStatus
    stop_reason: int | None = None
    """The stop id; None for the model's end token and for length."""


POOLED = Stop(RequestStatus.FINISHED_STOPPED)
"""A pooling request has its result."""
_EOS = Stop(RequestStatus.FINISHED_STOPPED)
_LENGTH = Stop(RequestStatus.FINISHED_LENGTH)
_REPETITION = Stop(RequestStatus.FINISHED_REPETITION)


def check_stop(request: Request) -> Stop | None:
    """Whether the last output token ends the request.

    Nothing stops below `min_tokens`; then the end token, stop ids, the length and repetitions
    count, in this order: an end token on the last allowed place reports `stop`.
    """
    num_output_tokens = request.num_output_tokens
    if num_output_tokens < request.min_tokens:
        return None
    token_id = request.all_token_ids[-1]
    if token_id == request.data.eos_token_id:
        return _EOS
    if token_id in request.stop_token_ids:
        return Stop(RequestStatus.FINISHED_STOPPED, token_id)
    if num_output_tokens >= request.max_tokens:
        return _LENGTH
    detection = request.repetition_detection
    if detection is not None and ends_with_repetition(
        request.all_token_ids, request.num_prompt_tokens, detection
    ):
        return _REPETITION
    return None


def append_tokens(request: Request, token_ids: list[int]) -> tuple[list[int], Stop | None]:
    """Append tokens until one stops the request; returns those appended, and the stop."""
    for count, token_id in enumerate(token_ids, start=1):
        request.all_token_ids.append(token_id)
        stop = check_stop(request)
        if stop is not None:
            return token_ids[:count], stop
    return token_ids, None


def describe_fault(token_ids: list[int], max_count: int, vocab_size: int) -> str | None:
    """What is wrong with sampled ids, of which 1 to `max_count` are due (none if it is 0)."""
    if not min(max_count, 1) <= len(token_ids) <= max_count:
        return f"the step brought {len(token_ids)} tokens where 1 to {max_count} were due"
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            return (
                f"token id {token_id} was sampled, outside of the vocabulary of {vocab_size}:"
                " the model's logits are damaged"
            )
    return None
