"""Tokens of reasoning, counted by the ids of its marks."""

from __future__ import annotations

import itertools

import pytest

from tokenmill.entrypoints.parsers.reasoning import ReasoningCounter
from tokenmill.tokenizer.reasoning import ReasoningMarkers

ONE = ReasoningMarkers((1,), (2,))
TWO = ReasoningMarkers((1, 1), (2, 3))


@pytest.mark.parametrize(
    ("markers", "is_open", "ids", "count"),
    [
        (ONE, None, [1, 9, 9, 2, 9], 2),
        (ONE, None, [8, 1, 9, 2, 9], 1),  # a blank line comes first
        (ONE, None, [9, 9, 9, 9, 1, 9, 2], 0),
        (ONE, None, [1, 9, 9], 2),
        (ONE, None, [1, 2, 1, 9, 2], 0),
        (ONE, True, [9, 9, 2, 9], 2),
        (ONE, True, [2, 9], 0),
        (ONE, False, [1, 9, 9, 2], 0),
        (ONE, True, [], 0),
        (TWO, None, [1, 1, 9, 2, 9, 2, 3, 9], 3),
        (TWO, True, [9, 2, 2, 3, 9], 2),
        (TWO, True, [9, 2], 2),
    ],
)
def test_counts_what_is_between_the_marks(markers, is_open, ids, count):
    for cuts in itertools.combinations(range(len(ids) + 1), 2):
        counter = ReasoningCounter(markers, is_open)
        for begin, end in itertools.pairwise((0, *cuts, len(ids))):
            counter.update(ids[begin:end])
        assert counter.count == count
