"""Prompt lookup: both ways against a search through all of the text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.kernels import native
from tokenmill.kernels.ngram_index import NgramIndex, PythonNgramIndex

KINDS = ["python", *(["native"] if native.is_available() else [])]


def make(kind: str, num_rows: int, shortest: int, longest: int) -> NgramIndex:
    if kind == "python":
        return PythonNgramIndex(num_rows, shortest, longest)
    return native.module().NgramIndex(num_rows, shortest, longest)


def searched(
    tokens: Sequence[int], shortest: int, longest: int, most: int
) -> tuple[list[int], int]:
    """The latest occurrence of the longest run, by trying all places."""
    for length in range(longest, shortest - 1, -1):
        run = list(tokens[len(tokens) - length :])
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(run) == length and list(tokens[end - length : end]) == run:
                text = list(tokens)
                for place in range(most):
                    text.append(text[end + place])
                return text[len(tokens) :], length
    return [], 0


def look_up(
    index: NgramIndex, table: np.ndarray, row: int, count: int, most: int, generation: int = 0
) -> tuple[list[int], int]:
    def one(value: int) -> np.ndarray:
        return np.array([value], np.int64)

    ((drafts, matched),) = index.propose(one(row), one(generation), table, one(count), one(most))
    return list(drafts), matched


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    lengths=st.tuples(st.integers(1, 5), st.integers(0, 4)),
    steps=st.lists(st.integers(1, 9), max_size=12),
    most=st.integers(0, 9),
)
def test_it_is_what_a_search_finds_however_the_text_grows(
    kind: str, tokens: list[int], lengths: tuple[int, int], steps: list[int], most: int
) -> None:
    shortest, longest = lengths[0], sum(lengths)
    index = make(kind, 3, shortest, longest)
    table = np.full((3, 64), 9, np.int32)
    table[1, : len(tokens)] = tokens
    count = 0
    for step in [*steps, len(tokens)]:
        count = min(count + step, len(tokens))
        wanted, matched = searched(tokens[:count], shortest, longest, most)
        assert look_up(index, table, 1, count, most) == (wanted, matched)


@pytest.mark.parametrize("kind", KINDS)
def test_another_request_in_the_row_begins_anew(kind: str) -> None:
    index = make(kind, 2, 2, 3)
    table = np.zeros((2, 8), np.int32)
    table[0] = [5, 6, 7, 5, 6, 0, 0, 0]
    assert look_up(index, table, 0, 5, 2) == ([7, 5], 2)
    table[0] = [1, 5, 6, 8, 5, 6, 0, 0]
    assert look_up(index, table, 0, 6, 2, generation=1) == ([8, 5], 2)
    assert look_up(index, table, 1, 1, 2) == ([], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_many_requests_and_long_texts(kind: str) -> None:
    """Tables grow; requests have numbers of drafts of their own."""
    rng = np.random.default_rng(0)
    index = make(kind, 4, 2, 6)
    table = rng.integers(0, 12, (4, 3000)).astype(np.int32)
    rows, counts = np.array([3, 0, 2]), np.array([3000, 1, 1700])
    most = np.array([4, 4, 1])
    found = index.propose(rows, np.zeros(3, np.int64), table, counts, most)
    for (drafts, matched), row, count, number in zip(found, rows, counts, most, strict=True):
        wanted = searched(table[row, :count].tolist(), 2, 6, int(number))
        assert (list(drafts), matched) == wanted


@pytest.mark.skipif(not native.is_available(), reason="the native kernels are not here")
@pytest.mark.parametrize(
    ("rows", "counts"), [([4], [1]), ([-1], [1]), ([0], [0]), ([0], [9]), ([0, 1], [1])]
)
def test_the_native_one_checks_its_arguments(rows: list[int], counts: list[int]) -> None:
    index = make("native", 4, 2, 3)
    ones = np.ones(len(rows), np.int64)
    with pytest.raises(ValueError, match="n-grams"):
        index.propose(np.array(rows), ones, np.zeros((4, 8), np.int32), np.array(counts), ones)
    with pytest.raises(ValueError, match="shortest"):
        native.module().NgramIndex(4, 3, 2)
