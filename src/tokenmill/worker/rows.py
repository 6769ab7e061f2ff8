"""A row for life: everything a worker keeps of a running request, in preallocated tables.

token_ids of a row:   | prompt ... output ... | drafts |
                      0                  num_tokens    num_tokens + num_drafts
KV is computed up to `num_computed_tokens`. Rows are never moved; a step gathers those it needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenmill.contracts.plan import BlockIds, NewRequestData, SchedulerOutput


class BlockTable:
    """The block ids of every row, for one KV cache group."""

    def __init__(self, max_num_seqs: int, max_num_blocks: int) -> None:
        self.block_ids = np.zeros((max_num_seqs, max_num_blocks), np.int32)
        """[max_num_seqs, max_num_blocks]; behind a row's blocks arbitrary, but valid ids"""
        self.num_blocks = np.zeros(max_num_seqs, np.int64)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks behind those that the row has."""
        start = self.num_blocks[row]
        end = start + len(block_ids)
        if len(block_ids) == 1:  # as a request decodes; numpy is quicker with one than with a slice
            self.block_ids[row, start] = block_ids[0]
        else:
            self.block_ids[row, start:end] = block_ids
        self.num_blocks[row] = end


class RowTable:
    """The requests at work, by row. Host memory; columns are int64 [max_num_seqs]."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_kv_groups: int
    ) -> None:
        self.block_size = block_size
        self.max_num_blocks = -(-max_model_len // block_size)
        """Of one request."""
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        """Tokens known: prompt and output."""
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_drafts = np.zeros(max_num_seqs, np.int64)
        self.generations = np.zeros(max_num_seqs, np.int64)
        """How many requests have entered a row: tells whether it is still the one it was."""
        self.block_tables = tuple(
            BlockTable(max_num_seqs, self.max_num_blocks) for _ in range(num_kv_groups)
        )

    def update(self, plan: SchedulerOutput) -> None:
        """Apply a plan's differences; once for each plan, in order."""
        for row in plan.finished_rows:
            self.clear(row)
        for request in plan.scheduled_new_reqs:
            self.add(request)
        cached = plan.scheduled_cached_reqs
        for row, block_ids in zip(cached.rows, cached.new_block_ids, strict=True):
            self.append_blocks(row, block_ids)
        for row, token_ids in zip(cached.appended_rows, cached.appended_token_ids, strict=True):
            self.append_tokens(row, token_ids)
        row_of = dict(zip(plan.req_ids, plan.rows, strict=True)) if plan.draft_token_ids else {}
        for req_id, draft_ids in plan.draft_token_ids.items():
            self.set_drafts(row_of[req_id], draft_ids)

    def clear(self, row: int) -> None:
        """Forget a row's request; a free row may be cleared again."""
        self.num_tokens[row] = 0
        self.num_prompt_tokens[row] = 0
        self.num_computed_tokens[row] = 0
        self.num_drafts[row] = 0
        for table in self.block_tables:
            table.num_blocks[row] = 0

    def add(self, request: NewRequestData) -> None:
        """Let a request into its row."""
        row = request.row
        self.clear(row)
        self.generations[row] += 1
        num_tokens = len(request.token_ids)
        self.token_ids[row, :num_tokens] = request.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.append_blocks(row, request.block_ids)

    def append_blocks(self, row: int, block_ids: BlockIds) -> None:
        """Append new blocks, one list for each KV cache group."""
        for table, new_ids in zip(self.block_tables, block_ids, strict=True):
            table.append(row, new_ids)

    def append_tokens(self, row: int, token_ids: Sequence[int]) -> None:
        """Add known tokens behind those that the row has."""
        start = self.num_tokens[row]
        end = start + len(token_ids)
        self.token_ids[row, start:end] = token_ids
        self.num_tokens[row] = end

    def keep_computed(self, row: int) -> None:
        """Of what a row has computed, keep what its known tokens say: drafts behind them did not
        hold, and the last token is never computed yet.
        """
        self.num_computed_tokens[row] = min(self.num_computed_tokens[row], self.num_tokens[row] - 1)

    def set_drafts(self, row: int, draft_token_ids: Sequence[int]) -> None:
        """Write drafts behind a row's known tokens, in place of earlier ones."""
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(draft_token_ids)] = draft_token_ids
        self.num_drafts[row] = len(draft_token_ids)

    def commit(
        self,
        rows: npt.NDArray[np.int64],
        num_computed: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int64],
    ) -> None:
        """Take over a step's progress; the only change of these counts while a request runs."""
        self.num_drafts[rows] = 0
        self.num_tokens[rows] = num_tokens
        self.num_computed_tokens[rows] = num_computed
