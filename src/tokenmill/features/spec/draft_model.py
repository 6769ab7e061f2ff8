"""A second, smaller model drafts: it goes on with each request's tokens, a pass for each draft.

It draws its tokens with the request's own parameters, seed and positions, so that at any
temperature it says what the other model says wherever the two agree.

Its keys and values lie in the same blocks as the other model's, in tensors of its own. So prefix
hits, preemption and release are the scheduler's, and this file only has to know how much of each
block is filled: the model follows where drafts are wanted, and may lag behind anywhere else. What
is missing of a request is computed before it gets drafts, at most a step's tokens at a time.

    token ids   | prompt ... output | drafts of the last turn ...
    computed    |<-- filled ------------>|  up to the first draft that did not hold
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.contracts.plan import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from tokenmill.contracts.seams import StepFuture
from tokenmill.features.spec.depths import Agree, Depths, alone
from tokenmill.features.spec.lengths import StepTimer

IntArray = npt.NDArray[np.int64]


class RowCounts(Protocol):
    """What is known of the rows of a runner; int64 [max_num_seqs]."""

    num_tokens: IntArray
    num_computed_tokens: IntArray


class PlanRunner(Protocol):
    """Runs plans of the model that drafts, on rows of its own."""

    @property
    def rows(self) -> RowCounts: ...

    def update_states(self, plan: SchedulerOutput) -> None: ...

    def execute_model(self, plan: SchedulerOutput) -> None: ...

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture: ...


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Sizes of the tables, and of what is drafted."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    """Of the model that drafts: nothing is drafted behind so many tokens."""
    block_size: int
    num_blocks: int
    kv_group: int
    """Of the other model's KV cache groups, the one that keeps everything: its blocks are used."""
    num_groups: int
    """Of the model that drafts; all of them use these blocks."""


@dataclass(slots=True)
class _Turn:
    """A request that is to get drafts."""

    req_id: str
    row: int
    length: int
    drafts: list[int]


class DraftModelDrafter:
    """Drives the model that drafts."""

    def __init__(
        self,
        runner: PlanRunner,
        limits: DraftLimits,
        num_drafts: int,
        *,
        adaptive: bool = True,
        timer: StepTimer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        agree: Agree = alone,
    ) -> None:
        """With `agree`, ranks that run the model together make the same passes."""
        self._runner = runner
        self._limits = limits
        self._depths = Depths(
            limits.max_num_seqs,
            num_drafts,
            adaptive=adaptive,
            timer=timer,
            clock=clock,
            agree=agree,
        )
        self._req_ids: list[str | None] = [None] * limits.max_num_seqs
        self._blocks: list[list[int]] = [[] for _ in range(limits.max_num_seqs)]
        self._num_filled = np.zeros(limits.num_blocks, np.int64)
        """Of each block, the slots from its first on that hold K and V of its tokens."""
        self._num_known = np.zeros(limits.max_num_seqs, np.int64)
        """Of each row, the tokens that the runner has been told; drafts of its own lie behind."""
        self._num_marked = np.zeros(limits.max_num_seqs, np.int64)
        """Of each row, the tokens whose slots are counted as filled."""
        self._step_id = 0

    @property
    def runner(self) -> PlanRunner:
        """Runs the model that drafts."""
        return self._runner

    # ---- following the scheduler ----------------------------------------------------------

    def update(self, plan: SchedulerOutput) -> None:
        """Take over which rows there are, and their blocks."""
        group, cached = self._limits.kv_group, plan.scheduled_cached_reqs
        own = self._next_plan()
        own.finished_rows = plan.finished_rows
        for row in plan.finished_rows:
            self._req_ids[row] = None
        own.scheduled_new_reqs = [self._enter(request) for request in plan.scheduled_new_reqs]
        for row, block_ids in zip(cached.rows, cached.new_block_ids, strict=True):
            self._num_filled[block_ids[group]] = 0
            self._blocks[row] += block_ids[group]
        own.scheduled_cached_reqs = CachedRequestData(
            rows=cached.rows,
            new_block_ids=[self._in_all_groups(ids[group]) for ids in cached.new_block_ids],
        )
        self._runner.update_states(own)
        self._depths.timer.begin(plan.num_scheduled_tokens)

    def _enter(self, request: NewRequestData) -> NewRequestData:
        """The request as the model that drafts sees it."""
        block_ids = request.block_ids[self._limits.kv_group]
        num_hits = request.num_computed_tokens // self._limits.block_size
        self._num_filled[block_ids[num_hits:]] = 0
        is_full = self._num_filled[block_ids[:num_hits]] == self._limits.block_size
        num_full = num_hits if is_full.all() else int(np.argmin(is_full))
        self._req_ids[request.row] = request.req_id
        self._blocks[request.row] = block_ids.copy()
        self._num_known[request.row] = len(request.token_ids)
        self._num_marked[request.row] = num_full * self._limits.block_size
        self._depths.acceptance.clear(request.row)
        return NewRequestData(
            req_id=request.req_id,
            row=request.row,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=num_full * self._limits.block_size,
            block_ids=self._in_all_groups(block_ids),
            sampling_params=request.sampling_params.replace(
                logprobs=None, prompt_logprobs=None, logprob_token_ids=None
            ),
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            token_rules=request.token_rules,
        )

    def _in_all_groups(self, block_ids: list[int]) -> tuple[list[int], ...]:
        return (block_ids,) * self._limits.num_groups

    # ---- drafting -------------------------------------------------------------------------

    def propose(
        self,
        req_ids: Sequence[str],
        rows: IntArray,
        num_tokens: IntArray,
        token_ids: npt.NDArray[np.int32],
    ) -> dict[str, list[int]]:
        """What the model goes on with, for the requests where that is worth its time.

        Nothing for those that have left their rows since their step began, as some have by the
        time a device has computed it.
        """
        self._depths.timer.end()
        at_work = [self._req_ids[row] == id_ for id_, row in zip(req_ids, rows, strict=True)]
        if not all(at_work):
            req_ids = list(compress(req_ids, at_work))
            rows, num_tokens = rows[at_work], num_tokens[at_work]
        self._tell_tokens(rows, num_tokens, token_ids)
        turns = self._choose(req_ids, rows.tolist(), num_tokens.tolist())
        turns = self._catch_up(turns)
        with self._depths.timed() as passes:
            while going_on := [turn for turn in turns if turn.length > 1 + len(passes)]:
                self._run(going_on, [1] * len(going_on))
                turns = [turn for turn in turns if turn.drafts]  # whose logits are no use has none
                passes.append(len(going_on))
        for turn in turns:
            start = int(self._num_known[turn.row])
            self._depths.acceptance.expect(turn.row, start, turn.drafts)
        return {turn.req_id: turn.drafts for turn in turns if turn.drafts}

    def _tell_tokens(
        self, rows: IntArray, num_tokens: IntArray, token_ids: npt.NDArray[np.int32]
    ) -> None:
        """Put the tokens that have come in place of the drafts; what they share is computed."""
        counts, plan = self._runner.rows, self._next_plan()
        cached = plan.scheduled_cached_reqs
        for row, end in zip(rows.tolist(), num_tokens.tolist(), strict=True):
            start = int(self._num_known[row])
            new = token_ids[row, start:end].tolist()
            num_held = self._depths.acceptance.observe(row, token_ids[row], end)
            counts.num_tokens[row] = start
            # The last token is computed once more if it was a draft: its logits are wanted.
            counts.num_computed_tokens[row] = min(
                counts.num_computed_tokens[row], start + num_held, end - 1
            )
            self._num_known[row] = end
            if new:
                cached.appended_rows.append(row)
                cached.appended_token_ids.append(new)
        self._runner.update_states(plan)

    def _choose(
        self, req_ids: Sequence[str], rows: list[int], num_tokens: list[int]
    ) -> list[_Turn]:
        """Who gets how many drafts: the last one needs no slot, as it is not computed."""
        room = [
            min(len(self._blocks[row]) * self._limits.block_size + 1, self._limits.max_model_len)
            - count
            for row, count in zip(rows, num_tokens, strict=True)
        ]
        wanted = zip(req_ids, rows, self._depths.choose(rows, room), strict=True)
        return [_Turn(req_id, row, length, []) for req_id, row, length in wanted if length]

    def _catch_up(self, turns: list[_Turn]) -> list[_Turn]:
        """Compute what is missing, and the first drafts; those for whom all of it was computed."""
        budget = self._limits.max_num_batched_tokens
        taken, counts = [], []
        for turn in turns:
            missing = int(
                self._num_known[turn.row] - self._runner.rows.num_computed_tokens[turn.row]
            )
            count = min(missing, budget)
            if count:
                taken.append(turn)
                counts.append(count)
                turn.length = turn.length if count == missing else 0
                budget -= count
        if taken:
            self._run(taken, counts)
            for turn in taken:
                self._mark_filled(turn.row)
        return [turn for turn in taken if turn.drafts]

    def _run(self, turns: Sequence[_Turn], counts: list[int]) -> None:
        """One pass: `counts` tokens of each request, and a draft behind where one is wanted."""
        plan = self._next_plan()
        plan.req_ids = [turn.req_id for turn in turns]
        plan.rows = [turn.row for turn in turns]
        plan.num_scheduled_tokens = counts
        plan.is_sampled = [turn.length > 0 for turn in turns]
        plan.num_logits = [int(is_sampled) for is_sampled in plan.is_sampled]
        self._runner.execute_model(plan)
        output = self._runner.sample_tokens(None).result()
        for turn, drafted in zip(turns, output.sampled_token_ids, strict=True):
            if turn.length and not drafted:
                turn.drafts, turn.length = [], 0
            turn.drafts += drafted

    def _mark_filled(self, row: int) -> None:
        """All slots of a row's known tokens that are computed hold what they should."""
        size = self._limits.block_size
        end = min(int(self._runner.rows.num_computed_tokens[row]), int(self._num_known[row]))
        first, last = int(self._num_marked[row]) // size, (end - 1) // size
        self._num_filled[self._blocks[row][first:last]] = size
        self._num_filled[self._blocks[row][last]] = end - last * size
        self._num_marked[row] = end

    def _next_plan(self) -> SchedulerOutput:
        self._step_id += 1
        return SchedulerOutput(self._step_id)
