"""How many drafts are worth their time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.features.spec.lengths import (
    FREE_DRAFTS,
    StepCost,
    StepTimer,
    choose_depth,
    choose_lengths,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def time_steps(timer: StepTimer, clock: Clock, counts: list[int], cost: StepCost) -> None:
    for count in counts:
        timer.begin([count])
        clock.now += cost.of(count)
        timer.end()


def worth(lengths: tuple[int, ...], rates: list[float], num_reqs: int, cost: StepCost) -> float:
    """Tokens per second of such a step."""
    gained = sum(
        rate**place for rate, n in zip(rates, lengths, strict=True) for place in range(1, n + 1)
    )
    return (num_reqs + gained) / cost.of(num_reqs + sum(lengths))


@given(
    rates=st.lists(st.floats(0.06, 0.98), min_size=1, max_size=3),
    others=st.integers(0, 6),
    base=st.floats(0.1, 30.0),
)
def test_no_other_lengths_bring_more_a_second(rates: list[float], others: int, base: float) -> None:
    cost = StepCost(base, 1.0)
    num_reqs = len(rates) + others
    chosen = choose_lengths(rates, [4] * len(rates), num_reqs, cost)
    best = max(
        worth(lengths, rates, num_reqs, cost)
        for lengths in itertools.product(range(5), repeat=len(rates))
        # Drafts that hardly ever hold are left out even where they are free.
        if all(rate**n >= 0.05 or n == 0 for rate, n in zip(rates, lengths, strict=True))
    )
    assert worth(tuple(chosen), rates, num_reqs, cost) == pytest.approx(best)


def test_a_draft_is_worth_less_beside_many_requests() -> None:
    cost = StepCost(base=3.0, per_token=1.0)
    by_requests = [choose_lengths([0.8] * n, [8] * n, n, cost)[0] for n in (1, 2, 4, 8, 32)]
    assert by_requests == sorted(by_requests, reverse=True)
    assert by_requests[0] > 2
    assert by_requests[-1] == 0


def test_where_tokens_are_free_all_drafts_that_ever_hold_are_made() -> None:
    assert choose_lengths([0.9, 0.5, 0.01], [8, 8, 8], 3, FREE_DRAFTS) == [8, 4, 0]


def test_the_line_is_found() -> None:
    clock = Clock()
    timer = StepTimer(largest=9, clock=clock)
    assert timer.cost == FREE_DRAFTS
    time_steps(timer, clock, [1, 1, 9, 1, 1, 5, 9, 1, 1], StepCost(3.0, 0.5))
    assert timer.cost.base == pytest.approx(3.0)
    assert timer.cost.per_token == pytest.approx(0.5)


def test_it_follows_a_machine_that_changes() -> None:
    clock = Clock()
    timer = StepTimer(largest=9, clock=clock)
    time_steps(timer, clock, [1, 9] * 20, StepCost(3.0, 0.5))
    time_steps(timer, clock, [1, 9] * 60, StepCost(4.0, 0.1))
    assert timer.cost.per_token == pytest.approx(0.1, rel=0.05)


def test_prompts_and_steps_that_were_held_up_say_little() -> None:
    clock = Clock()
    timer = StepTimer(largest=9, clock=clock)
    time_steps(timer, clock, [1, 5] * 20, StepCost(3.0, 0.5))
    time_steps(timer, clock, [300], StepCost(3.0, 5.0))
    time_steps(timer, clock, [5], StepCost(1000.0, 0.5))
    time_steps(timer, clock, [1, 5] * 8, StepCost(3.0, 0.5))
    assert timer.cost.per_token == pytest.approx(0.5, rel=0.5)


def test_steps_without_drafts_are_wanted_at_first_and_now_and_then() -> None:
    clock = Clock()
    timer = StepTimer(largest=9, clock=clock)
    wanted = []
    for _ in range(200):
        wanted.append(timer.wants_plain)
        time_steps(timer, clock, [1 if timer.wants_plain else 5], StepCost(3.0, 0.5))
    assert wanted[:5] == [True, True, True, False, False]
    assert [place for place, plain in enumerate(wanted) if plain][3:] == [67, 132, 197]


def test_a_line_never_falls() -> None:
    clock = Clock()
    timer = StepTimer(largest=9, clock=clock)
    time_steps(timer, clock, [1, 9] * 10, StepCost(9.0, -0.5))
    assert timer.cost.per_token == 0.0


@given(
    rates=st.lists(st.floats(0.06, 0.98), min_size=1, max_size=4),
    base=st.floats(0.1, 30.0),
    pass_seconds=st.floats(0.0, 3.0),
)
def test_no_other_depth_brings_more_a_second(
    rates: list[float], base: float, pass_seconds: float
) -> None:
    cost, most = StepCost(base, 1.0), [5, 3, 5, 0][: len(rates)]

    def worth_of(lengths: list[int]) -> float:
        passes = StepCost(cost.base + max(lengths) * pass_seconds, cost.per_token)
        return worth(tuple(lengths), rates, len(rates), passes)

    chosen = choose_depth(rates, most, len(rates), cost, pass_seconds)
    for depth in range(6):
        useful = [max((n for n in range(1, 6) if rate**n >= 0.05), default=0) for rate in rates]
        lengths = [min(depth, each, n) for each, n in zip(most, useful, strict=True)]
        assert worth_of(chosen) >= worth_of(lengths) - 1e-9


def test_passes_that_take_long_are_not_made() -> None:
    cost = StepCost(base=3.0, per_token=0.5)
    assert choose_depth([0.9], [4], 1, cost, pass_seconds=0.1)[0] >= 3
    assert choose_depth([0.9], [4], 1, cost, pass_seconds=5.0) == [0]
    assert choose_depth([], [], 0, cost, pass_seconds=0.1) == []
