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
    cost = StepCost.line(base, 1.0)
    num_reqs = len(rates) + others
    plain = worth((0,) * len(rates), rates, num_reqs, cost)
    chosen = choose_lengths(rates, [4] * len(rates), num_reqs, cost)
    best = max(
        worth(lengths, rates, num_reqs, cost)
        for lengths in itertools.product(range(5), repeat=len(rates))
        # Drafts that hardly ever hold are left out even where they are free.
        if all(rate**n >= 0.05 or n == 0 for rate, n in zip(rates, lengths, strict=True))
    )
    if best > 1.1 * plain * (1 + 1e-9):
        assert worth(tuple(chosen), rates, num_reqs, cost) == pytest.approx(best)
    elif best < 1.1 * plain * (1 - 1e-9):  # not worth the trouble
        assert not any(chosen)


def test_a_draft_is_worth_less_beside_many_requests() -> None:
    cost = StepCost.line(base=3.0, per_token=1.0)
    by_requests = [choose_lengths([0.8] * n, [8] * n, n, cost)[0] for n in (1, 2, 4, 8, 32)]
    assert by_requests == sorted(by_requests, reverse=True)
    assert by_requests[0] > 2
    assert by_requests[-1] == 0


def test_where_tokens_are_free_all_drafts_that_ever_hold_are_made() -> None:
    assert choose_lengths([0.9, 0.5, 0.01], [8, 8, 8], 3, FREE_DRAFTS) == [8, 4, 0]


def test_steps_of_each_size_are_measured() -> None:
    """They need not lie on a line."""
    clock = Clock()
    timer = StepTimer(largest=9, clock=clock)
    assert timer.cost == FREE_DRAFTS
    known = StepCost((1.0, 4.0, 9.0), (3.0, 4.0, 12.0))
    time_steps(timer, clock, [1, 1, 9, 4, 1, 9, 4, 1, 1], known)
    for size in (1, 2, 4, 6, 9):
        assert timer.cost.of(size) == pytest.approx(known.of(size))


def test_what_is_not_known_goes_on_as_what_is() -> None:
    cost = StepCost((4.0, 8.0, 16.0), (3.0, 4.0, 9.0))
    assert cost.of(6) == 3.5
    assert cost.of(12) == 6.5
    assert cost.of(28) == 15.0
    assert cost.of(2) == 2.0
    assert StepCost((4.0, 8.0), (3.0, 2.0)).of(16) == 2.0
    assert StepCost((100.0, 200.0), (1.0, 200.0)).of(1) > 0.0


def test_drafts_that_reach_a_dearer_size_stop_before_it() -> None:
    cost = StepCost((1.0, 5.0, 6.0, 9.0), (1.0, 1.2, 5.0, 5.1))
    assert choose_lengths([0.9], [8], 1, cost) == [4]


def test_it_follows_a_machine_that_changes() -> None:
    clock = Clock()
    timer = StepTimer(largest=9, clock=clock)
    time_steps(timer, clock, [1, 9] * 20, StepCost.line(3.0, 0.5))
    time_steps(timer, clock, [1, 9] * 60, StepCost.line(4.0, 0.1))
    assert timer.cost.of(9) - timer.cost.of(1) == pytest.approx(0.8, rel=0.05)


def test_prompts_and_steps_that_were_held_up_say_little() -> None:
    clock = Clock()
    timer = StepTimer(largest=9, clock=clock)
    time_steps(timer, clock, [1, 5] * 20, StepCost.line(3.0, 0.5))
    time_steps(timer, clock, [300], StepCost.line(3.0, 5.0))
    time_steps(timer, clock, [5], StepCost.line(1000.0, 0.5))
    time_steps(timer, clock, [1, 5] * 8, StepCost.line(3.0, 0.5))
    assert timer.cost.of(5) - timer.cost.of(1) == pytest.approx(2.0, rel=0.5)


def test_steps_without_drafts_are_wanted_at_first_and_now_and_then() -> None:
    clock = Clock()
    timer = StepTimer(largest=9, clock=clock)
    wanted = []
    for _ in range(200):
        wanted.append(timer.wants_plain)
        time_steps(timer, clock, [1 if timer.wants_plain else 5], StepCost.line(3.0, 0.5))
    assert wanted[:5] == [True, True, True, False, False]
    assert [place for place, plain in enumerate(wanted) if plain][3:] == [67, 132, 197]


@given(
    rates=st.lists(st.floats(0.06, 0.98), min_size=1, max_size=4),
    base=st.floats(0.1, 30.0),
    pass_seconds=st.floats(0.0, 3.0),
)
def test_no_other_depth_brings_more_a_second(
    rates: list[float], base: float, pass_seconds: float
) -> None:
    cost, most = StepCost.line(base, 1.0), [5, 3, 5, 0][: len(rates)]

    def worth_of(lengths: list[int]) -> float:
        passes = StepCost.line(base + max(lengths) * pass_seconds, 1.0)
        return worth(tuple(lengths), rates, len(rates), passes)

    chosen = choose_depth(rates, most, len(rates), cost, pass_seconds)
    for depth in range(6):
        useful = [max((n for n in range(1, 6) if rate**n >= 0.05), default=0) for rate in rates]
        lengths = [min(depth, each, n) for each, n in zip(most, useful, strict=True)]
        assert worth_of(chosen) >= worth_of(lengths) / (1.0 if any(chosen) else 1.1) - 1e-9


def test_passes_that_take_long_are_not_made() -> None:
    cost = StepCost.line(base=3.0, per_token=0.5)
    assert choose_depth([0.9], [4], 1, cost, pass_seconds=0.1)[0] >= 3
    assert choose_depth([0.9], [4], 1, cost, pass_seconds=5.0) == [0]
    assert choose_depth([], [], 0, cost, pass_seconds=0.1) == []
