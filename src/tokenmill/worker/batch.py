"""One step's flat batch: all scheduled tokens of all requests, one after another.

Requests A, B, C with 2, 1 and 4 tokens; logits of A's last, B's only and C's last two tokens:

    input_ids        a5 a6 | b9 | c0 c1 c2 c3
    positions         5  6 |  9 |  0  1  2  3
    query_start_loc   0      2    3            7
    seq_lens              7   10              4
    logits_indices        1    2        5  6          places in the flat batch
    logits_start      0        1    2          4      where each request's run of logits begins
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.worker.rows import RowTable

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class InputBatch:
    """A step's batch of `num_reqs` requests and `num_tokens` tokens, in host memory.

    The arrays are views of `InputBuffers`, valid until the next step is prepared.
    """

    req_ids: list[str]
    rows: IntArray
    """[num_reqs]"""
    num_scheduled_tokens: IntArray
    """[num_reqs]"""
    query_start_loc: npt.NDArray[np.int32]
    """[num_reqs + 1]"""
    seq_lens: npt.NDArray[np.int32]
    """[num_reqs]"""
    input_ids: npt.NDArray[np.int32]
    """[num_tokens]"""
    positions: IntArray
    """[num_tokens]"""
    block_tables: tuple[npt.NDArray[np.int32], ...]
    """One for each KV cache group, [num_reqs, blocks of the longest request]."""
    slot_mappings: tuple[IntArray, ...]
    """One for each KV cache group, [num_tokens]."""
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

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @cached_property
    def sampled_indices(self) -> IntArray:
        """Places in the flat batch after which a token is sampled, in order of requests."""
        return self.logits_indices[runs(self.logits_start[1:] - self.num_sampled, self.num_sampled)]

    @cached_property
    def sampled_start(self) -> IntArray:
        """[num_reqs], where each request's run of `sampled_indices` begins"""
        return np.cumsum(self.num_sampled) - self.num_sampled

    @property
    def max_query_len(self) -> int:
        return int(self.num_scheduled_tokens.max())

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens.max())


class InputBuffers:
    """The memory of every step's batch, allocated once at its largest shape."""

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_blocks: int,
        block_size: int,
        num_kv_groups: int,
    ) -> None:
        self._block_size = block_size
        self._query_start_loc = np.zeros(max_num_seqs + 1, np.int32)
        self._seq_lens = np.zeros(max_num_seqs, np.int32)
        self._input_ids = np.zeros(max_num_batched_tokens, np.int32)
        self._positions = np.zeros(max_num_batched_tokens, np.int64)
        self._block_tables = [
            np.zeros((max_num_seqs, max_num_blocks), np.int32) for _ in range(num_kv_groups)
        ]
        self._slot_mappings = [
            np.zeros(max_num_batched_tokens, np.int64) for _ in range(num_kv_groups)
        ]

    def full_batch(self) -> InputBatch:
        """A batch of one request that fills the token buffers, at positions of the null block."""
        self._positions[:] = 0
        self._query_start_loc[1] = 1
        self._seq_lens[0] = 1
        none = np.zeros(0, np.int64)
        return InputBatch(
            req_ids=[],
            rows=np.zeros(1, np.int64),
            num_scheduled_tokens=np.ones(1, np.int64),
            query_start_loc=self._query_start_loc[:2],
            seq_lens=self._seq_lens[:1],
            input_ids=self._input_ids,
            positions=self._positions,
            block_tables=tuple(buffer[:1, :1] for buffer in self._block_tables),
            slot_mappings=tuple(self._slot_mappings),
            logits_indices=none,
            logits_start=np.zeros(2, np.int64),
            num_sampled=np.zeros(1, np.int64),
        )

    def gather(self, plan: SchedulerOutput, table: RowTable) -> InputBatch:
        """The batch of a plan with at least one request."""
        rows = np.array(plan.rows, np.int64)
        counts = np.array(plan.num_scheduled_tokens, np.int64)
        num_drafts = table.num_drafts[rows]
        first = table.num_computed_tokens[rows]
        ends = first + counts
        assert (ends <= table.num_tokens[rows] + num_drafts).all(), "a plan runs past known tokens"

        num_reqs, num_tokens = len(rows), int(counts.sum())
        query_start_loc = self._query_start_loc[: num_reqs + 1]
        query_start_loc[1:] = np.cumsum(counts)
        seq_lens = self._seq_lens[:num_reqs]
        seq_lens[:] = ends
        positions = self._positions[:num_tokens]
        positions[:] = runs(first, counts)
        token_rows = np.repeat(rows, counts)
        input_ids = self._input_ids[:num_tokens]
        input_ids[:] = table.token_ids[token_rows, positions]

        num_logits = np.array(plan.num_logits, np.int64)
        num_sampled = np.where(np.array(plan.is_sampled, np.bool_), 1 + num_drafts, 0)
        assert (num_sampled <= num_logits).all(), "a plan samples where it has no logits"
        return InputBatch(
            req_ids=plan.req_ids,
            rows=rows,
            num_scheduled_tokens=counts,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            input_ids=input_ids,
            positions=positions,
            block_tables=self._gather_block_tables(table, rows, int(ends.max())),
            slot_mappings=self._map_slots(table, token_rows, positions),
            logits_indices=runs(query_start_loc[1:] - num_logits, num_logits),
            logits_start=np.concatenate(([0], np.cumsum(num_logits))),
            num_sampled=num_sampled,
        )

    def _gather_block_tables(
        self, table: RowTable, rows: IntArray, max_seq_len: int
    ) -> tuple[npt.NDArray[np.int32], ...]:
        num_blocks = -(-max_seq_len // self._block_size)
        gathered = [buffer[: len(rows), :num_blocks] for buffer in self._block_tables]
        for buffer, group in zip(gathered, table.block_tables, strict=True):
            buffer[:] = group.block_ids[rows, :num_blocks]
        return tuple(gathered)

    def _map_slots(
        self, table: RowTable, token_rows: IntArray, positions: IntArray
    ) -> tuple[IntArray, ...]:
        block_index, offset = np.divmod(positions, self._block_size)
        mapped = [buffer[: len(positions)] for buffer in self._slot_mappings]
        for buffer, group in zip(mapped, table.block_tables, strict=True):
            buffer[:] = group.block_ids[token_rows, block_index]
            buffer *= self._block_size
            buffer += offset
        return tuple(mapped)


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
