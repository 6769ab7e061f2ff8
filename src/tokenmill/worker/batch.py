"""One step's flat batch: all scheduled tokens of all requests, one after another.

Requests A, B, C with 2, 1 and 4 tokens; logits of A's last, B's only and C's last two tokens:

    input_ids        a5 a6 | b9 | c0 c1 c2 c3
    positions         5  6 |  9 |  0  1  2  3
    query_start_loc   0      2    3            7
    seq_lens              7   10              4
    logits_indices        1    2        5  6          places in the flat batch
    logits_start      0        1    2          4      where each request's run of logits begins

The host plans with numbers (`InputBatch`); what the model reads lies on its device
(`BatchTensors`), where a recorded step may want it padded (`BatchShape`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.attention.items import ItemRuns
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.worker.rows import RowTable

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How large a step is."""

    num_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int


@dataclass(slots=True)
class NewTokens:
    """Which sampled tokens the requests of a batch keep, and where these go."""

    counts: IntArray
    """[num_reqs]"""
    num_computed: IntArray
    """[num_reqs], tokens whose KV is in the cache then; one more token is known of who gained"""
    entries: IntArray
    """[num_new], which of the samples"""
    rows: IntArray
    """[num_new]"""
    generations: IntArray
    """[num_new], of the rows"""
    positions: IntArray
    """[num_new]"""


@dataclass
class InputBatch:
    """A step's batch of `num_reqs` requests, in numbers of the host; not to be changed."""

    req_ids: list[str]
    rows: IntArray
    """[num_reqs]"""
    num_scheduled_tokens: IntArray
    """[num_reqs]"""
    num_computed_tokens: IntArray
    """[num_reqs], before this step"""
    generations: IntArray
    """[num_reqs], of the rows"""
    logits_indices: IntArray
    """[num_logits], in order of requests"""
    logits_start: IntArray
    """[num_reqs + 1]"""
    num_sampled: IntArray
    """[num_reqs]; so many of the last logits of a request's run are sampled from: 0 in the middle
    of a prompt, else 1 + drafts. Those before are for prompt log-probabilities."""

    @property
    def num_reqs(self) -> int:
        return len(self.rows)

    @cached_property
    def query_start_loc(self) -> npt.NDArray[np.int32]:
        """[num_reqs + 1]"""
        starts = np.zeros(self.num_reqs + 1, np.int32)
        np.cumsum(self.num_scheduled_tokens, out=starts[1:])
        return starts

    @cached_property
    def seq_lens(self) -> npt.NDArray[np.int32]:
        """[num_reqs], this step's tokens included"""
        return (self.num_computed_tokens + self.num_scheduled_tokens).astype(np.int32)

    @cached_property
    def shape(self) -> BatchShape:
        return BatchShape(
            num_tokens=int(self.query_start_loc[-1]),
            num_reqs=self.num_reqs,
            max_query_len=int(self.num_scheduled_tokens.max()),
            max_seq_len=int(self.seq_lens.max()),
        )

    @cached_property
    def logits_positions(self) -> IntArray:
        """[num_logits], where in their sequences the tokens stand after which logits are due"""
        num_logits = np.diff(self.logits_start)
        return runs(self.seq_lens - num_logits, num_logits)

    @cached_property
    def _sampled(self) -> IntArray:
        """Entries of `logits_indices` that are sampled from."""
        return runs(self.logits_start[1:] - self.num_sampled, self.num_sampled)

    @cached_property
    def sampled_indices(self) -> IntArray:
        """Places in the flat batch after which a token is sampled, in order of requests."""
        return self.logits_indices[self._sampled]

    @cached_property
    def sampled_positions(self) -> IntArray:
        """Where in their sequences the sampled tokens will stand, in the same order."""
        return self.logits_positions[self._sampled] + 1

    @cached_property
    def sampled_start(self) -> IntArray:
        """[num_reqs], where each request's run of `sampled_indices` begins"""
        return np.cumsum(self.num_sampled) - self.num_sampled

    @cached_property
    def sampled_rows(self) -> IntArray:
        """The rows of `sampled_indices`."""
        return np.repeat(self.rows, self.num_sampled)

    @cached_property
    def has_drafts(self) -> bool:
        """Whether a request samples more than one token: only its ids tell how many it gains."""
        return bool((self.num_sampled > 1).any())

    def new_tokens(self, counts: IntArray) -> NewTokens:
        """What becomes of the samples if the requests gain so many tokens, [num_reqs]."""
        entries = runs(self.sampled_start, counts)
        return NewTokens(
            counts=counts,
            num_computed=self.seq_lens - self.num_sampled + counts,
            entries=entries,
            rows=np.repeat(self.rows, counts),
            generations=np.repeat(self.generations, counts),
            positions=self.sampled_positions[entries],
        )


class DecodeBatch(InputBatch):
    """Every request computes one token and samples the next: most steps, and little to work out."""

    def __init__(
        self, req_ids: list[str], rows: IntArray, num_computed: IntArray, generations: IntArray
    ) -> None:
        num_reqs = len(rows)
        ones, counting = _ones_and_counting(num_reqs)
        super().__init__(
            req_ids=req_ids,
            rows=rows,
            num_scheduled_tokens=ones,
            num_computed_tokens=num_computed,
            generations=generations,
            logits_indices=counting[:num_reqs],
            logits_start=counting,
            num_sampled=ones,
        )

    @cached_property
    def shape(self) -> BatchShape:
        num_reqs = len(self.rows)
        return BatchShape(num_reqs, num_reqs, 1, int(self.num_computed_tokens.max()) + 1)

    @cached_property
    def logits_positions(self) -> IntArray:
        return self.num_computed_tokens

    @cached_property
    def sampled_indices(self) -> IntArray:
        return self.logits_indices

    @cached_property
    def sampled_positions(self) -> IntArray:
        return self.num_computed_tokens + 1

    @cached_property
    def sampled_start(self) -> IntArray:
        return self.logits_indices

    @cached_property
    def sampled_rows(self) -> IntArray:
        return self.rows

    @cached_property
    def has_drafts(self) -> bool:
        return False

    def new_tokens(self, counts: IntArray) -> NewTokens:
        positions = self.sampled_positions
        return NewTokens(
            counts, positions, self.logits_indices, self.rows, self.generations, positions
        )


@lru_cache(maxsize=1024)
def _ones_and_counting(count: int) -> tuple[IntArray, IntArray]:
    """So many ones, and the numbers from 0 to count."""
    return np.ones(count, np.int64), np.arange(count + 1)


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """What the model and attention read of a step, on their device, perhaps padded.

    The tensors are buffers of every step, valid until the next one is prepared.
    """

    shape: BatchShape
    input_ids: torch.Tensor
    """int32 [num_tokens]"""
    positions: torch.Tensor
    """int64 [num_tokens]"""
    query_start_loc: torch.Tensor
    """int32 [num_reqs + 1]"""
    seq_lens: torch.Tensor
    """int32 [num_reqs]"""
    block_tables: tuple[torch.Tensor, ...]
    """One for each KV cache group, int32 [num_reqs, blocks of the longest request or more]."""
    slot_mappings: tuple[torch.Tensor, ...]
    """One for each KV cache group, int64 [num_tokens]; -1 where padding writes nowhere."""
    inputs_embeds: torch.Tensor | None = None
    """[num_tokens, hidden_size], in place of `input_ids`; None where all tokens are text."""
    item_runs: ItemRuns | None = None
    """Tokens that see each other in both directions; None where there are none."""


def gather_batch(plan: SchedulerOutput, table: RowTable) -> InputBatch:
    """The batch of a plan with at least one request."""
    rows = np.array(plan.rows, np.int64)
    if _is_decode(plan):
        num_computed = table.num_computed_tokens[rows]
        assert (num_computed < table.num_tokens[rows]).all(), "a plan runs past known tokens"
        return DecodeBatch(plan.req_ids, rows, num_computed, table.generations[rows])
    counts = np.array(plan.num_scheduled_tokens, np.int64)
    num_drafts = table.num_drafts[rows]
    num_computed = table.num_computed_tokens[rows]
    ends = num_computed + counts
    assert (ends <= table.num_tokens[rows] + num_drafts).all(), "a plan runs past known tokens"

    num_logits = np.array(plan.num_logits, np.int64)
    num_sampled = np.where(np.array(plan.is_sampled, np.bool_), 1 + num_drafts, 0)
    assert (num_sampled <= num_logits).all(), "a plan samples where it has no logits"
    query_ends = np.cumsum(counts)
    return InputBatch(
        req_ids=plan.req_ids,
        rows=rows,
        num_scheduled_tokens=counts,
        num_computed_tokens=num_computed,
        generations=table.generations[rows],
        logits_indices=runs(query_ends - num_logits, num_logits),
        logits_start=np.concatenate(([0], np.cumsum(num_logits))),
        num_sampled=num_sampled,
    )


def _is_decode(plan: SchedulerOutput) -> bool:
    num_reqs = len(plan.rows)
    return (
        not plan.draft_token_ids
        and plan.num_scheduled_tokens.count(1) == num_reqs
        and plan.num_logits.count(1) == num_reqs
        and all(plan.is_sampled)
    )


def runs(first: npt.NDArray[np.integer], counts: IntArray) -> IntArray:
    """The numbers first[i], first[i] + 1, ... (counts[i] of them) for each i, in one array.

    >>> runs(np.array([5, 0]), np.array([2, 3]))
    array([5, 6, 0, 1, 2])
    """
    if (counts == 1).all():  # a step of decoding requests: nearly always
        return first.astype(np.int64)
    starts = np.cumsum(counts) - counts
    numbers: IntArray = np.arange(int(counts.sum())) + np.repeat(first - starts, counts)
    return numbers
