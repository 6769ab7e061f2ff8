"""A head drafts: it reads the hidden states that the model has left, and goes on with the text.

Entry i of a request pairs the state behind token i with token i + 1 (`models/draft_head.py`). So
the head's runner has rows like any other, for texts without their first token:

    the model's tokens      t0    t1    t2    t3    t4
    computed by the model   h0    h1    h2    h3            t4 was sampled last
    the head's tokens       t1    t2    t3    t4
    entries                 t1 h0 t2 h1 t3 h2 t4 h3         drafts come behind the last one

States last until the model's next step. So every step is followed, whether or not there are to be
drafts: in one pass the entries of all its tokens are computed, prompts in the pieces in which the
model computes them, and the first drafts behind them. For each further draft there is a pass with
an entry of what was drafted last and the state that the head itself left.

K and V of entry i lie at the model's slot i, in a tensor of the head's own. A block that is found
by its hash then holds the entries of its tokens. The last of these has the token that followed when
the block was filled: behind the end of a shared prefix it may be another request's, which costs a
draft some of its worth at the most. To compute it again would need a block more of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.contracts.plan import CachedRequestData, NewRequestData, SchedulerOutput
from tokenmill.features.spec.depths import Depths
from tokenmill.features.spec.draft_model import DraftLimits, PlanRunner
from tokenmill.features.spec.lengths import StepTimer

IntArray = npt.NDArray[np.int64]
TokenTable = npt.NDArray[np.int32]


class StateFeed(Protocol):
    """Brings the hidden states to the head's next pass, in the order of its entries."""

    def feed_from_model(self, places: IntArray) -> None:
        """Those of the tokens at `places` of the flat batch of the model's last step."""
        ...

    def feed_back(self, places: IntArray) -> None:
        """Those that the entries at `places` of the head's last pass have left."""
        ...


@dataclass(slots=True)
class _Followed:
    """A request of the model's last step."""

    req_id: str
    row: int
    place: int
    """Of its first token in the flat batch."""
    start: int
    """Tokens computed before the step: the first entry to compute."""
    end: int
    """Tokens computed behind it, drafts that did not hold left out: one more is known."""
    num_drafts: int = 0
    """That it is to get."""
    drafts: list[int] = field(default_factory=list)


class HeadDrafter:
    """Drives the head."""

    def __init__(
        self,
        runner: PlanRunner,
        feed: StateFeed,
        limits: DraftLimits,
        num_drafts: int,
        *,
        adaptive: bool = True,
        timer: StepTimer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._feed = feed
        self._limits = limits
        self._depths = Depths(
            limits.max_num_seqs, num_drafts, adaptive=adaptive, timer=timer, clock=clock
        )
        self._num_slots = np.zeros(limits.max_num_seqs, np.int64)
        self._num_told = np.zeros(limits.max_num_seqs, np.int64)
        """Of each row, the head's tokens that the runner knows; drafts lie behind them."""
        self._step: list[_Followed] = []
        self._step_id = 0

    @property
    def runner(self) -> PlanRunner:
        """Runs the head."""
        return self._runner

    # ---- following the scheduler and the model --------------------------------------------

    def update(self, plan: SchedulerOutput) -> None:
        """Take over which rows there are, and their blocks."""
        group, cached = self._limits.kv_group, plan.scheduled_cached_reqs
        own = self._next_plan()
        own.finished_rows = plan.finished_rows
        own.scheduled_new_reqs = [self._enter(request) for request in plan.scheduled_new_reqs]
        for row, block_ids in zip(cached.rows, cached.new_block_ids, strict=True):
            self._num_slots[row] += len(block_ids[group]) * self._limits.block_size
        own.scheduled_cached_reqs = CachedRequestData(
            rows=cached.rows,
            new_block_ids=[self._in_all_groups(ids[group]) for ids in cached.new_block_ids],
        )
        self._runner.update_states(own)
        self._depths.timer.begin(plan.num_scheduled_tokens)

    def _enter(self, request: NewRequestData) -> NewRequestData:
        """The request as the head sees it."""
        block_ids = request.block_ids[self._limits.kv_group]
        self._num_slots[request.row] = len(block_ids) * self._limits.block_size
        self._num_told[request.row] = len(request.token_ids) - 1
        self._depths.acceptance.clear(request.row)
        return NewRequestData(
            req_id=request.req_id,
            row=request.row,
            token_ids=request.token_ids[1:],
            num_prompt_tokens=request.num_prompt_tokens - 1,
            num_computed_tokens=request.num_computed_tokens,
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

    def begin(self, plan: SchedulerOutput, num_computed_tokens: IntArray) -> None:
        """The model computes a plan whose requests have so many tokens computed; whoever breaks a
        step is in another one, alone.
        """
        self._step, place = [], 0
        counts = plan.num_scheduled_tokens
        starts = num_computed_tokens.tolist()
        for req_id, row, start, count in zip(plan.req_ids, plan.rows, starts, counts, strict=True):
            self._step.append(_Followed(req_id, row, place, start, start + count))
            place += count

    def settle(self, num_computed_tokens: IntArray) -> None:
        """The model has computed the plan, and so many tokens of its requests stand."""
        for followed, end in zip(self._step, num_computed_tokens.tolist(), strict=True):
            followed.end = min(followed.end, end)

    # ---- drafting -------------------------------------------------------------------------

    def propose(
        self,
        req_ids: Sequence[str],
        rows: IntArray,
        num_tokens: IntArray,
        token_ids: TokenTable,
    ) -> dict[str, list[int]]:
        """What the head goes on with, for the requests where that is worth its time."""
        self._depths.timer.end()
        self._tell_tokens(token_ids)
        self._choose(rows.tolist(), num_tokens.tolist(), token_ids)
        turns, places = self._follow()
        with self._depths.timed() as passes:
            while going_on := [
                index
                for index, turn in enumerate(turns)
                if len(turn.drafts) == len(passes) + 1 < turn.num_drafts
            ]:
                self._feed.feed_back(places[going_on])
                turns = [turns[index] for index in going_on]
                places = np.arange(len(turns))
                self._run(turns, [1] * len(turns))
                passes.append(len(turns))
        drafted = {each.row: each for each in self._step if each.drafts}
        for row, count in zip(rows.tolist(), num_tokens.tolist(), strict=True):
            if row in drafted:
                self._depths.acceptance.expect(row, count, drafted[row].drafts)
        return {each.req_id: each.drafts for each in drafted.values()}

    def _tell_tokens(self, token_ids: TokenTable) -> None:
        """Put the tokens that have come in place of the drafts."""
        counts, plan = self._runner.rows, self._next_plan()
        cached = plan.scheduled_cached_reqs
        for followed in self._step:
            row, told = followed.row, int(self._num_told[followed.row])
            counts.num_tokens[row] = told
            counts.num_computed_tokens[row] = followed.start
            new = token_ids[row, told + 1 : followed.end + 1].tolist()
            if new:
                cached.appended_rows.append(row)
                cached.appended_token_ids.append(new)
                self._num_told[row] = followed.end
        self._runner.update_states(plan)

    def _choose(self, rows: list[int], num_tokens: list[int], token_ids: TokenTable) -> None:
        """Who gets how many drafts: the last one needs no slot, as no entry has it."""
        for row, count in zip(rows, num_tokens, strict=True):
            self._depths.acceptance.observe(row, token_ids[row], count)
        room = [
            min(int(self._num_slots[row]) + 1, self._limits.max_model_len) - count
            for row, count in zip(rows, num_tokens, strict=True)
        ]
        lengths = dict(zip(rows, self._depths.choose(rows, room), strict=True))
        for followed in self._step:
            followed.num_drafts = lengths.get(followed.row, 0)

    def _follow(self) -> tuple[list[_Followed], IntArray]:
        """Compute the entries of the step's tokens, and the first drafts; whose entries they were,
        and where the last of each lies in the pass.

        Behind the head's own context there are none.
        """
        turns, counts, read = [], [], []
        for followed in self._step:
            count = min(followed.end, self._limits.max_model_len) - followed.start
            if count > 0:
                turns.append(followed)
                counts.append(count)
                read.append(np.arange(followed.place, followed.place + count))
        if turns:
            self._feed.feed_from_model(np.concatenate(read))
            self._run(turns, counts)
        return turns, np.cumsum(counts, dtype=np.int64) - 1

    def _run(self, turns: Sequence[_Followed], counts: list[int]) -> None:
        """One pass: so many entries of each request, and a draft behind where one is wanted."""
        plan = self._next_plan()
        plan.req_ids = [turn.req_id for turn in turns]
        plan.rows = [turn.row for turn in turns]
        plan.num_scheduled_tokens = counts
        plan.is_sampled = [turn.num_drafts > 0 for turn in turns]
        plan.num_logits = [int(is_sampled) for is_sampled in plan.is_sampled]
        self._runner.execute_model(plan)
        output = self._runner.sample_tokens(None).result()
        for turn, drafted in zip(turns, output.sampled_token_ids, strict=True):
            turn.drafts += drafted

    def _next_plan(self) -> SchedulerOutput:
        self._step_id += 1
        return SchedulerOutput(self._step_id)
