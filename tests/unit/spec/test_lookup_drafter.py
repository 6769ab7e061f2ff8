"""Drafts that are looked up, as the worker asks for them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from helpers.sampling import new_request
from tokenmill.config.speculation import SpeculativeConfig
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.features.spec.lengths import StepCost, StepTimer
from tokenmill.features.spec.lookup import AllTexts, LookupDrafter, OwnText

REPEATED = [5, 6, 7, 8, 9, 10]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Rows:
    """Rows with one request each, which go on with the tokens that a test says."""

    def __init__(self, cost: StepCost, num_rows: int = 1, **settings: object) -> None:
        settings = {"method": "ngram", "num_speculative_tokens": 6} | settings
        config = SpeculativeConfig(**settings)
        texts = OwnText if config.method == "ngram" else AllTexts
        self._clock, self._cost = Clock(), cost
        timer = StepTimer(largest=7, clock=self._clock)
        self.drafter = LookupDrafter(texts(config, num_rows), config, num_rows, timer)
        self.table = np.zeros((num_rows, 4096), np.int32)
        self.counts = np.zeros(num_rows, np.int64)
        self._drafts: dict[str, list[int]] = {}

    def enter(self, prompts: list[list[int]], cache_salt: str | None = None) -> None:
        plan = SchedulerOutput(0)
        for row, prompt in enumerate(prompts):
            self.table[row, : len(prompt)] = prompt
            self.counts[row] = len(prompt)
            request = new_request(token_ids=prompt)
            request.row, request.cache_salt = row, cache_salt
            plan.scheduled_new_reqs.append(request)
        self.drafter.update(plan)

    def step(self, comes: list[list[int]]) -> dict[str, list[int]]:
        """A step that brings each row the drafts that hold and one token; the new drafts."""
        names = [str(row) for row in range(len(comes))]
        sizes = [1 + len(self._drafts.get(name, [])) for name in names]
        plan = SchedulerOutput(1, req_ids=names, num_scheduled_tokens=sizes)
        self.drafter.update(plan)
        self._clock.now += self._cost.of(sum(sizes))
        for row, name in enumerate(names):
            drafts, start = self._drafts.get(name, []), int(self.counts[row])
            held = 0
            while held < len(drafts) and drafts[held] == comes[row][held]:
                held += 1
            new = [comes[row].pop(0) for _ in range(held + 1)]
            self.table[row, start : start + len(new)] = new
            self.counts[row] += len(new)
        rows = np.arange(len(comes))
        self._drafts = self.drafter.propose(names, rows, self.counts, self.table)
        return self._drafts


def test_what_followed_the_last_tokens_is_drafted() -> None:
    rows = Rows(StepCost.line(1.0, 0.0), adaptive=False)
    rows.enter([[*REPEATED, 1, 5, 6]])
    assert rows.step([[7, 0]]) == {"0": [8, 9, 10, 1, 5, 6]}


def test_nothing_is_drafted_where_nothing_stood_before() -> None:
    rows = Rows(StepCost.line(1.0, 0.0), adaptive=False)
    rows.enter([[1, 2, 3, 4]])
    assert rows.step([[5]]) == {}


def test_what_another_request_was_told_is_drafted_unless_they_have_salts() -> None:
    rows = Rows(StepCost.line(1.0, 0.0), method="suffix", adaptive=False)
    for _ in range(3):
        rows.enter([[*REPEATED, 1]])
        rows.step([[2]])
    rows.enter([[3, 5]])
    assert rows.step([[6]])["0"][:4] == [7, 8, 9, 10]
    rows.enter([[3, 5]], cache_salt="tenant")
    assert rows.step([[6]]) == {}


def test_drafts_that_hold_are_made_and_those_that_do_not_are_given_up() -> None:
    cost = StepCost.line(3.0, 1.0)
    copying = Rows(cost)
    copying.enter([REPEATED * 2])
    comes = REPEATED * 60
    for _ in range(20):
        drafts = copying.step([comes])
    assert len(drafts["0"]) >= 3

    draw = random.Random(0)
    wandering = Rows(StepCost.line(1.0, 1.0))
    wandering.enter([[draw.randrange(3) for _ in range(200)]])
    comes = [draw.randrange(3) for _ in range(900)]
    made = [len(wandering.step([comes]).get("0", [])) for _ in range(300)]
    assert sum(made[:20]) > 0
    assert sum(made[-100:]) < 10


def test_a_row_that_begins_to_repeat_itself_gets_drafts_again() -> None:
    """Guesses are watched while none of them is sent."""
    draw = random.Random(1)
    rows = Rows(StepCost.line(3.0, 1.0))
    rows.enter([[draw.randrange(3) for _ in range(200)]])
    comes = [draw.randrange(3) for _ in range(400)]
    for _ in range(200):
        rows.step([comes])
    comes = REPEATED * 80
    made = [len(rows.step([comes]).get("0", [])) for _ in range(40)]
    assert sum(made[-10:]) >= 30


@pytest.mark.parametrize(("num_rows", "some"), [(1, True), (48, False)])
def test_a_crowd_that_is_bound_by_arithmetic_gets_no_drafts(num_rows: int, some: bool) -> None:
    rows = Rows(StepCost.line(3.0, 1.0), num_rows=num_rows)
    rows.enter([REPEATED * 2 for _ in range(num_rows)])
    draw = random.Random(2)
    # Every fifth token is another one: about four drafts of five hold.
    comes = [
        [token if draw.random() < 0.8 else 3 for token in REPEATED * 80] for _ in range(num_rows)
    ]
    made = [sum(map(len, rows.step(comes).values())) for _ in range(60)]
    assert (sum(made[-20:]) > 20) == some
