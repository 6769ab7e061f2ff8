"""A model that drafts, on one whose cache holds token ids: what it reads from a slot that is not
its own, or was not computed, changes all that it says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.sampling import new_request
from helpers.worker import NAN_TOKEN, generate_alone, make_worker
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.features.spec.draft_model import DraftLimits, DraftModelDrafter
from tokenmill.features.spec.lengths import StepCost, StepTimer

BLOCK_SIZE = 4
NUM_DRAFTS = 3


class Target:
    """The other model's rows and blocks, as its scheduler would hand them out."""

    def __init__(self, *, budget: int = 4096, max_model_len: int = 256, **kwargs: Any) -> None:
        worker, self.model = make_worker(max_num_batched_tokens=budget)
        limits = DraftLimits(
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=200,
            kv_group=1,
            num_groups=1,
        )
        self.drafter = DraftModelDrafter(
            worker.runner, limits, NUM_DRAFTS, **({"adaptive": False} | kwargs)
        )
        self.table = np.zeros((8, 256), np.int32)
        self.known: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}
        self.params: dict[int, dict[str, Any]] = {}
        self._free = list(range(199, 0, -1))

    def enter(
        self, row: int, prompt: list[int], hits: list[int] | None = None, **params: Any
    ) -> None:
        """A request, with blocks of others at its beginning; there is room for its drafts."""
        self.leave(row)
        hits = hits or []
        needed = -(-(len(prompt) + NUM_DRAFTS + 1) // BLOCK_SIZE)
        new = [self._free.pop() for _ in range(needed - len(hits))]
        request = new_request(token_ids=prompt, **params)
        request.req_id = f"r{row}"
        request.row, request.num_computed_tokens = row, BLOCK_SIZE * len(hits)
        request.block_ids = ([], [*hits, *new])
        self.known[row], self.blocks[row], self.params[row] = list(prompt), [*hits, *new], params
        self.drafter.update(SchedulerOutput(0, scheduled_new_reqs=[request]))

    def leave(self, row: int) -> None:
        """Its blocks are the next that are handed out."""
        if row in self.blocks:
            own = self.blocks.pop(row)
            shared = {block for blocks in self.blocks.values() for block in blocks}
            self._free += [block for block in own if block not in shared]
            self.drafter.update(SchedulerOutput(0, finished_rows=[row]))

    def gain(self, **tokens: list[int]) -> dict[str, list[int]]:
        """A step brings tokens to rows `r0`, `r1`, ...; what is drafted behind them."""
        plan = SchedulerOutput(0, num_scheduled_tokens=[1] * len(tokens))
        rows = [int(name[1:]) for name in tokens]
        for row, new in zip(rows, tokens.values(), strict=True):
            self.known[row] += new
            self.table[row, : len(self.known[row])] = self.known[row]
            needed = -(-(len(self.known[row]) + NUM_DRAFTS) // BLOCK_SIZE) - len(self.blocks[row])
            if needed > 0:
                more = [self._free.pop() for _ in range(needed)]
                self.blocks[row] += more
                plan.scheduled_cached_reqs.rows.append(row)
                plan.scheduled_cached_reqs.new_block_ids.append(([], more))
        self.drafter.update(plan)
        counts = np.array([len(self.known[row]) for row in rows])
        return self.drafter.propose(list(tokens), np.array(rows), counts, self.table)

    def late_gain(self, req_id: str, row: int, length: int) -> dict[str, list[int]]:
        """The tokens of a step come after another one has begun."""
        counts = np.array([length])
        return self.drafter.propose([req_id], np.array([row]), counts, self.table)

    def expected(self, row: int, count: int = NUM_DRAFTS) -> list[int]:
        """What the toy model goes on with."""
        return generate_alone(self.known[row], count, **self.params[row])

    def num_computed(self) -> int:
        """Tokens that the toy model has computed so far."""
        return sum(len(input_ids) for input_ids, _ in self.model.seen)


SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.4},
]


@pytest.mark.parametrize("params", SAMPLING)
def test_it_goes_on_with_the_requests_own_parameters(params: dict[str, Any]) -> None:
    target = Target()
    target.enter(2, [3, 1, 4, 1, 5], **params)
    assert target.gain(r2=[9]) == {"r2": target.expected(2)}
    assert target.gain(r2=target.expected(2)[:2]) == {"r2": target.expected(2)}
    assert target.gain(r2=[7]) == {"r2": target.expected(2)}  # no draft held


def test_tokens_that_were_computed_are_not_computed_again() -> None:
    target = Target()
    target.enter(0, [3, 1, 4, 1, 5], temperature=0.0)
    target.gain(r0=[9])
    assert target.num_computed() == 6 + 2  # the first draft comes with the prompt's pass
    target.gain(r0=[*target.expected(0), 7])  # all held; the last was not computed, and 7 is new
    assert target.num_computed() == 8 + 2 + 2
    target.gain(r0=[8])  # none held: what was computed of them is void
    assert target.num_computed() == 12 + 1 + 2


def test_a_hit_counts_as_far_as_this_model_has_filled_it() -> None:
    target = Target()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    target.enter(0, prompt, temperature=0.0)  # gets no drafts: nothing is computed for it
    target.enter(1, [*prompt, 7], hits=target.blocks[0][:2], temperature=0.0)
    assert target.gain(r1=[8]) == {"r1": target.expected(1)}
    assert target.num_computed() == 11 + 2
    target.enter(2, [*prompt, 9], hits=target.blocks[0][:2], temperature=0.0)
    assert target.gain(r2=[8]) == {"r2": target.expected(2)}
    assert target.num_computed() == 13 + 3 + 2


def test_blocks_that_are_handed_out_again_hold_nothing() -> None:
    target = Target()
    target.enter(0, [3, 1, 4, 1, 5, 9, 2], temperature=0.0)
    target.gain(r0=[8])
    before = target.blocks[0][:2]
    target.leave(0)
    target.enter(1, [2, 7, 1, 8, 2, 8, 1], temperature=0.0)
    assert set(before) & set(target.blocks[1])
    assert target.gain(r1=[8]) == {"r1": target.expected(1)}


def test_who_has_left_its_row_gets_no_drafts_and_harms_nobody() -> None:
    target = Target()
    target.enter(0, [3, 1, 4, 1, 5], temperature=0.0)
    target.gain(r0=[9])
    target.leave(0)
    assert target.late_gain("r0", 0, 7) == {}
    target.enter(0, [2, 7, 1], temperature=0.0)
    assert target.late_gain("one before", 0, 7) == {}
    assert target.gain(r0=[8]) == {"r0": target.expected(0)}


def test_long_prompts_are_computed_in_pieces_and_get_no_drafts_before() -> None:
    target = Target(budget=8)
    target.enter(0, list(range(20)), temperature=0.0)
    target.enter(1, [5, 6], temperature=0.0)
    assert target.gain(r0=[1], r1=[1]) == {}  # 8 of 21
    assert target.gain(r0=[2], r1=[2]) == {}  # 16 of 22
    assert target.gain(r0=[3], r1=[3]) == {"r0": target.expected(0)}
    assert target.gain(r1=[4]) == {"r1": target.expected(1)}


def test_nothing_is_drafted_behind_its_context() -> None:
    target = Target(max_model_len=10)
    target.enter(0, [1, 2, 3, 4, 5, 6, 7], temperature=0.0)
    assert target.gain(r0=[8]) == {"r0": target.expected(0, 2)}
    assert target.gain(r0=[8, 8]) == {}
    assert target.gain(r0=[8]) == {}


def test_a_prefix_without_usable_logits_gets_no_drafts() -> None:
    target = Target()
    target.enter(0, [1, NAN_TOKEN], temperature=0.0)
    target.enter(1, [1, 2], temperature=0.0)
    assert target.gain(r0=[3], r1=[3]) == {"r1": target.expected(1)}


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_it_says_what_it_says_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    target = Target(budget=24)
    for _ in range(60):
        row = int(rng.integers(5))
        if row not in target.blocks or rng.random() < 0.1 or len(target.known[row]) > 60:
            hits = None
            prompt = rng.integers(0, 5, rng.integers(1, 30)).tolist()
            donors = [each for each in target.blocks if each != row]
            if donors and rng.random() < 0.6:
                donor = donors[int(rng.integers(len(donors)))]
                num_hits = int(rng.integers(len(target.known[donor]) // BLOCK_SIZE + 1))
                hits = target.blocks[donor][:num_hits]
                prompt = [*target.known[donor][: num_hits * BLOCK_SIZE], *prompt]
            params = SAMPLING[int(rng.integers(len(SAMPLING)))]
            target.enter(row, prompt, hits=hits, **params)
        running = [each for each in target.blocks if rng.random() < 0.7]
        comes = {
            f"r{each}": [
                *target.expected(each)[: int(rng.integers(NUM_DRAFTS + 1))],
                int(rng.integers(5)),
            ]
            for each in running
        }
        if comes:
            for name, drafts in target.gain(**comes).items():
                assert drafts == target.expected(int(name[1:]))[: len(drafts)]


def test_passes_that_cost_more_than_they_bring_are_given_up() -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            self.now += 50.0  # a pass takes longer than any step
            return self.now

    class Timer(StepTimer):
        wants_plain = False

        def end(self) -> None:
            self.cost = StepCost.line(3.0, 0.5)

    target = Target(adaptive=True, timer=Timer(largest=4), clock=Clock())
    target.enter(0, [3, 1, 4], temperature=0.0)
    assert target.gain(r0=[1])["r0"]  # what a pass takes is not known yet
    assert [target.gain(r0=[1]) for _ in range(20)] == [{}] * 20
