"""The scheduler's one rule where it is short: a request computes its last token and gets the next.

Nearly all that a scheduler does is this, hundreds of times a step. What `Step.add`, `Step.launch`
and `Scheduler._settle` do for any request is spelled out here for such a one; that the plans and
the outputs are the same is tested (`tests/unit/core/test_decoding.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.contracts.request import EngineCoreOutput
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.core.kv.manager import KVCacheManager
from tokenmill.core.request import Request, RequestStatus
from tokenmill.core.step import Step
from tokenmill.core.stop import check_stop


def decodes_in_place(request: Request, num_lookahead_tokens: int = 0) -> bool:
    """Whether all that is pending of a running request is its last token, there is a slot for it,
    and for so many more, and a token will be sampled behind it.
    """
    num_expected = len(request.all_token_ids) + request.num_output_placeholders
    return (
        request.num_computed_tokens == num_expected - 1
        and num_expected + num_lookahead_tokens <= request.num_slots
        and request.is_plain
        and num_expected < request.num_prompt_tokens + request.max_tokens
        and not request.draft_token_ids
    )


def got_its_token(step: Step, index: int, result: ModelRunnerOutput, vocab_size: int) -> bool:
    """Whether entry `index` of a step has computed one token and got a valid one, as was due, of a
    result that has tokens only.
    """
    request, plan, sampled = step.requests[index], step.plan, result.sampled_token_ids[index]
    return (
        request.is_plain
        and len(sampled) == 1
        and plan.num_scheduled_tokens[index] == 1
        and plan.is_sampled[index]
        and 0 <= sampled[0] < vocab_size
        and request.is_running
        and request.pending_prompt_logprobs is None
        and not plan.draft_token_ids
    )


def settle_token(
    request: Request,
    sampled: list[int],
    kv: KVCacheManager,
    finish: Callable[[Request, RequestStatus], None],
) -> EngineCoreOutput:
    """Append such a token, and end the request with `finish` if it stops it."""
    request.all_token_ids.append(sampled[0])
    stop = check_stop(request)
    request.num_output_placeholders -= 1
    request.num_settled_tokens += 1
    if request.num_settled_tokens % kv.block_size == 0:  # a block has become full
        kv.cache_blocks(request, request.num_settled_tokens)
    if stop is not None:
        finish(request, stop.status)
    return request.make_output(sampled, None if stop is None else stop.stop_reason)
