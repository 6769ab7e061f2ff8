"""Drafts by suffix: what they are, and that both ways agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.kernels import native
from tokenmill.kernels.suffix_index import PythonSuffixIndex, SuffixIndex

KINDS = ["python", *(["native"] if native.is_available() else [])]
SIZES = (2, 1, 6, 1 << 12, 0.1)


def make(kind: str, *sizes: float) -> SuffixIndex:
    if kind == "python":
        return PythonSuffixIndex(*sizes)  # type: ignore[arg-type]
    return native.module().SuffixIndex(*sizes)


class Text:
    """Rows that a test writes, looked up one at a time."""

    def __init__(self, index: SuffixIndex, num_rows: int = 2) -> None:
        self._index = index
        self._table = np.zeros((num_rows, 400), np.int32)
        self._generations = np.zeros(num_rows, np.int64)

    def enter(self, row: int) -> None:
        self._generations[row] += 1

    def draft(
        self, row: int, tokens: list[int], most: int = 8, salt: int = 0
    ) -> tuple[list[int], int]:
        self._table[row, : len(tokens)] = tokens
        one = np.array([row])
        ((drafts, matched),) = self._index.propose(
            one,
            self._generations[one],
            np.array([salt], np.uint64),
            self._table,
            np.array([len(tokens)]),
            np.array([most]),
        )
        return list(drafts), matched


@pytest.mark.parametrize("kind", KINDS)
def test_what_mostly_followed_is_drafted_as_long_as_it_is_likely(kind: str) -> None:
    text = Text(make(kind, *SIZES))
    drafts, matched = text.draft(0, [5, 6, 7, 8, 1, 5, 6, 7, 8, 2, 5, 6])
    # Seen twice, 7 and 8 are two of three each. Behind 8 stood 1 and then 2: one of three. What
    # stood behind that was seen once, one of two: all four are less likely than one in ten.
    assert (drafts, matched) == ([7, 8, 2], 2)
    assert text.draft(0, [5, 6, 7, 8, 1, 5, 6, 7, 8, 2, 5, 6], most=1) == ([7], 2)
    assert text.draft(0, [5, 6, 7, 8, 1, 5, 6, 7, 8, 2, 5, 6], most=0) == ([], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_learn_from_those_before_them_unless_their_salts_differ(kind: str) -> None:
    text = Text(make(kind, *SIZES))
    for _ in range(4):
        text.enter(0)
        text.draft(0, [5, 6, 7, 8, 9, 10])
    assert text.draft(1, [3, 5, 6]) == ([7, 8, 9, 10], 2)
    text.enter(1)
    assert text.draft(1, [3, 5, 6], salt=1) == ([], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_come_any_more_gives_way(kind: str) -> None:
    """A table of two places is enough to see it: whatever is seen now is drafted."""
    text = Text(make(kind, 2, 1, 2, 2, 0.1))
    for start in (10, 20, 30):
        for _ in range(30):
            text.enter(0)
            text.draft(0, [start, start + 1] * 20)
        assert text.draft(1, [start]) is not None
    drafts, _ = text.draft(0, [30, 31] * 20)
    assert drafts[:1] in ([30], [])


@pytest.mark.skipif(len(KINDS) == 1, reason="the native kernels are not here")
@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.lists(st.integers(0, 3), min_size=1, max_size=60),
            st.integers(0, 1),
            st.booleans(),
        ),
        max_size=8,
    ),
    lengths=st.tuples(st.integers(1, 4), st.integers(0, 4)),
    places=st.sampled_from([1, 4, 64, 4096]),
)
def test_both_ways_agree(
    texts: list[tuple[int, list[int], int, bool]], lengths: tuple[int, int], places: int
) -> None:
    sizes = (2, lengths[0], sum(lengths), places, 0.05)
    ours, theirs = Text(make("python", *sizes)), Text(make("native", *sizes))
    for row, tokens, salt, grows in texts:
        for text in (ours, theirs):
            text.enter(row)
        for count in range(1, len(tokens) + 1) if grows else [len(tokens)]:
            expected = ours.draft(row, tokens[:count], salt=salt)
            assert theirs.draft(row, tokens[:count], salt=salt) == expected


@pytest.mark.skipif(len(KINDS) == 1, reason="the native kernels are not here")
def test_counts_do_not_run_over() -> None:
    sizes = (1, 1, 1, 16, 0.05)
    ours, theirs = Text(make("python", *sizes), 1), Text(make("native", *sizes), 1)
    for _ in range(200):
        for text in (ours, theirs):
            text.enter(0)
            text.draft(0, [7] * 399)
    assert ours.draft(0, [7] * 399) == theirs.draft(0, [7] * 399) == ([7] * 8, 1)


@pytest.mark.skipif(len(KINDS) == 1, reason="the native kernels are not here")
@pytest.mark.parametrize("sizes", [(0, 1, 2, 4), (1, 0, 2, 4), (1, 3, 2, 4), (1, 1, 2, 5)])
def test_the_native_one_checks_its_arguments(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="suffixes"):
        native.module().SuffixIndex(*sizes, 0.1)
