"""The plan of one step: what the scheduler tells the workers.

A plan carries differences only. A worker keeps everything about a running request in its row; the
plan names the rows that compute in this step, how much, and what changed since the last plan.
Plans are applied in the order of their `step_id`.

    row            number of a request's place in the worker's tables, fixed while it runs
    num_tokens     tokens of the row to compute in this step
    num_logits     how many of the last of these tokens need logits:
                   0 in the middle of a prompt, 1 where a token is sampled, k + 1 with k drafts,
                   all of a chunk where prompt log-probabilities are owed (they are not once they
                   were delivered, even if the prompt is computed again after preemption)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tokenmill.contracts.request import (
    AdapterRef,
    EngineCoreRequest,
    MultiModalFeature,
    PoolingRequest,
    TokenRules,
)
from tokenmill.sampling_params import SamplingParams

BlockIds = tuple[list[int], ...]
"""Block ids of one request, one list per KV cache group."""


@dataclass(slots=True)
class NewRequestData:
    """A request that enters a row, for the first time or again after preemption."""

    req_id: str
    row: int
    token_ids: list[int]
    """Prompt, and the output known so far (not empty after preemption)."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is in `block_ids` already, from the prefix cache."""
    block_ids: BlockIds
    sampling_params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...]
    """Every id that could end the request; masked below `min_tokens`, empty without a minimum."""
    adapter: AdapterRef | None = None
    mm_features: list[MultiModalFeature] = field(default_factory=list)
    token_rules: TokenRules | None = None
    pooling: PoolingRequest | None = None
    """Set where the hidden states of the prompt are wanted, and no token."""
    cache_salt: str | None = None
    """Only requests with the same may learn from each other."""

    @classmethod
    def from_request(
        cls,
        request: EngineCoreRequest,
        *,
        row: int,
        token_ids: list[int],
        num_computed_tokens: int,
        block_ids: BlockIds,
    ) -> NewRequestData:
        return cls(
            req_id=request.request_id,
            row=row,
            token_ids=token_ids,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_computed_tokens=num_computed_tokens,
            block_ids=block_ids,
            sampling_params=request.sampling_params,
            seed=request.seed,
            stop_token_ids=tuple(request.min_tokens_mask_ids),
            adapter=request.adapter,
            mm_features=request.mm_features,
            token_rules=request.token_rules,
            pooling=request.pooling,
            cache_salt=request.cache_salt,
        )


class CachedRequestData(msgspec.Struct):
    """What changed in rows that the workers know already: parallel lists, one entry a change."""

    rows: list[int] = []
    new_block_ids: list[BlockIds] = []
    """Blocks to append to the row's block tables."""
    appended_rows: list[int] = []
    appended_token_ids: list[list[int]] = []
    """Tokens of a row that were not sampled, since a grammar leaves no choice: they follow those
    that the row has. At most one entry a row."""


class EncoderWork(msgspec.Struct):
    """What a step does beside its tokens with images and the like (`core/encoder.py`)."""

    items: list[tuple[int, int]]
    """To encode: row, and place among the features of its request. One for each content that is not
    kept yet; the step's other requests may need it as well."""
    freed_hashes: list[str]
    """Contents whose embeddings are to be forgotten, before anything is encoded."""


class SchedulerOutput(msgspec.Struct):
    """One step's plan. The four lists of the batch are parallel: entry i is one request."""

    step_id: int
    req_ids: list[str] = []
    rows: list[int] = []
    num_scheduled_tokens: list[int] = []
    num_logits: list[int] = []
    is_sampled: list[bool] = []
    """Whether a token is sampled after the row's last token (not in the middle of a prompt)."""
    scheduled_new_reqs: list[NewRequestData] = []
    scheduled_cached_reqs: CachedRequestData = msgspec.field(default_factory=CachedRequestData)
    finished_rows: list[int] = []
    """Rows freed since the last plan, by an end, an abort or a preemption. They are cleared before
    new requests enter, so that a row may be freed and taken in one plan."""
    draft_token_ids: dict[str, list[int]] = {}
    """Drafts of a row, the last of its scheduled tokens; only where there are any."""
    structured_req_ids: list[str] = []
    """Requests of this step whose sampled tokens a grammar restricts."""
    encoder: EncoderWork | None = None
    """None where nothing is encoded and nothing forgotten."""
    is_repeated: bool = False
    """Whether it is the plan before once more: the same batch, and nothing has changed in any row
    but what the step before has brought."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)


@dataclass(slots=True)
class GrammarOutput:
    """Masks for the rows of one step that a grammar restricts; made while the forward runs."""

    req_ids: list[str]
    bitmask: bytes
    """int32 words, little-endian, [number of logits rows of req_ids, ceil(vocab_size / 32)];
    a set bit allows the token."""
