"""How often drafts hold, from those that were made."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.features.spec.acceptance import Acceptance


def guess(rates: Acceptance, row: int, guessed: list[int], came: list[int], kind: int = 0) -> None:
    """One guess behind two known tokens, and what came of it."""
    rates.expect(row, 2, guessed, kind)
    table = np.array([0, 0, *came, 0, 0, 0], np.int32)
    rates.observe(row, table, 2 + len(came))


def test_a_row_whose_guesses_hold_is_trusted_and_another_is_not() -> None:
    rates = Acceptance(num_rows=3)
    before = rates.rate(2)
    for _ in range(30):
        guess(rates, 0, [7, 8, 9], [7, 8, 9, 1])
        guess(rates, 1, [7, 8, 9], [6])
    assert rates.rate(0) > 0.9
    assert rates.rate(1) < 0.2
    assert rates.rate(0) > rates.rate(2) > rates.rate(1)
    assert rates.rate(2) != before  # what others saw is all that is known of a new row


def test_the_share_of_drafts_that_held() -> None:
    rates = Acceptance(num_rows=1)
    for _ in range(200):  # two hold, the third does not: two of three that were tried
        guess(rates, 0, [7, 8, 9, 9], [7, 8, 1])
    assert rates.rate(0) == pytest.approx(2 / 3, abs=0.03)


def test_what_no_token_has_come_for_is_not_counted() -> None:
    rates = Acceptance(num_rows=1)
    for _ in range(50):
        guess(rates, 0, [7, 8, 9], [7])
    assert rates.rate(0) > 0.95


def test_a_row_is_forgotten_with_its_request() -> None:
    rates = Acceptance(num_rows=2)
    for _ in range(5):
        guess(rates, 0, [7], [6])
    rates.clear(0)
    assert rates.rate(0) == rates.rate(1)


def test_a_guess_is_compared_once() -> None:
    rates = Acceptance(num_rows=1)
    guess(rates, 0, [7], [7])
    once = rates.rate(0)
    rates.observe(0, np.array([0, 0, 6], np.int32), 3)
    assert rates.rate(0) == once


def test_kinds_are_told_apart() -> None:
    rates = Acceptance(num_rows=3, num_kinds=2)
    for _ in range(100):
        guess(rates, 0, [7], [7], kind=1)
        guess(rates, 1, [7], [6], kind=0)
    assert rates.rate(2, kind=1) > 0.9
    assert rates.rate(2, kind=0) < 0.1


def test_a_row_that_is_not_asked_gets_another_chance() -> None:
    rates = Acceptance(num_rows=1)
    for _ in range(40):
        guess(rates, 0, [7, 8], [6])
    bad = rates.rate(0)
    for _ in range(200):
        rates.forget_slowly(0)
    assert rates.rate(0) > 0.5 > bad
