"""The scheduler's one rule where it is short: a request computes its last token and gets the next.

Nearly all that a scheduler does is this, hundreds of times a step. What `Step.add`, `Step.launch`
and `Scheduler._settle` do for any request is spelled out here, and in `Step.add_decode` and
`Step.repeat`, for such a one; that the plans and the outputs are the same is tested
(`tests/unit/core/test_decoding.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.contracts.request import EngineCoreOutput
from tokenmill.core.kv.manager import KVCacheManager
from tokenmill.core.request import Request, RequestStatus
from tokenmill.core.stop import check_stop

_RUNNING = RequestStatus.RUNNING


def steps_in_place(request: Request, num_lookahead_tokens: int = 0) -> int:
    """In how many of the next steps all that is pending of a running request is its last token,
    there is a slot for it and for so many more, and a token will be sampled behind it, if each of
    them brings that token and nothing else comes up.
    """
    num_expected = len(request.all_token_ids) + request.num_output_placeholders
    if (
        request.num_computed_tokens != num_expected - 1
        or not request.is_plain
        or request.draft_token_ids
    ):
        return 0
    num_slots = request.num_slots - num_lookahead_tokens
    last = request.max_num_tokens - 1
    return (num_slots if num_slots < last else last) - num_expected + 1


def settle_token(
    request: Request,
    sampled: list[int],
    vocab_size: int,
    kv: KVCacheManager,
    finish: Callable[[Request, RequestStatus], None],
) -> EngineCoreOutput | None:
    """Append the one token of a request that decodes, and end it with `finish` if that stops it.

    None is that there is more to it, and nothing has happened.
    """
    if (
        request.status is not _RUNNING
        or len(sampled) != 1
        or not 0 <= sampled[0] < vocab_size
        or request.pending_prompt_logprobs is not None
    ):
        return None
    token_ids, token_id = request.all_token_ids, sampled[0]
    token_ids.append(token_id)
    request.num_output_placeholders -= 1
    request.num_settled_tokens += 1
    if request.num_settled_tokens % kv.block_size == 0:  # a block has become full
        kv.cache_blocks(request, request.num_settled_tokens)
    if (
        token_id in request.end_token_ids
        or len(token_ids) >= request.max_num_tokens
        or request.repetition_detection is not None
    ):
        stop = check_stop(request)
        if stop is not None:
            finish(request, stop.status)
            return request.make_output(sampled, stop.stop_reason)
    return request.make_output(sampled)
