"""The stop string checker, against a search of the whole text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.stop_strings import StopStringChecker
from tokenmill.errors import InvalidRequestError
from tokenmill.sampling_params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams

few_letters = st.text("ab", max_size=40)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def chunks_of(text, cuts):
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


def first_match(text, stops):
    """(end, position in the list) decides; a match is (stop, start, end)."""
    ends = [(text.find(stop) + len(stop), i) for i, stop in enumerate(stops) if stop in text]
    if not ends:
        return None
    end, i = min(ends)
    return stops[i], end - len(stops[i]), end


@given(few_letters, st.lists(st.integers(0, 100), max_size=8), stop_lists)
def test_b004_finds_what_a_search_of_the_whole_text_finds(text, cuts, stops):
    checker = StopStringChecker(stops)
    match = None
    for chunk in chunks_of(text, cuts):
        match = checker.feed(chunk)
        if match is not None:
            break
    expected = first_match(text, stops)
    assert expected == (match and (match.stop, match.start, match.end))


@given(few_letters, stop_lists)
def test_b001_holds_just_what_may_begin_a_stop_string(text, stops):
    checker = StopStringChecker(stops)
    if checker.feed(text) is None:
        beginnings = [
            length
            for stop in stops
            for length in range(1, len(stop))
            if text.endswith(stop[:length])
        ]
        assert checker.num_held == max(beginnings, default=0)


@given(few_letters, few_letters, stop_lists)
def test_text_without_honour_begins_matches_but_ends_none(early, late, stops):
    checker = StopStringChecker(stops)
    assert checker.feed(early, honour=False) is None
    match = checker.feed(late)
    text = early + late
    ends = [
        (end, i)
        for i, stop in enumerate(stops)
        for end in range(max(len(stop), len(early) + 1), len(text) + 1)
        if text[:end].endswith(stop)
    ]
    assert (match and match.end) == (min(ends)[0] if ends else None)


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["lo w"], ["hel", "lo wor", "ld"], ("lo w", 3, 7)),  # ends inside a token
        (["world", "o w"], ["hello world"], ("o w", 4, 7)),  # complete first, though begun later
        (["bc", "abc"], ["ab", "cd"], ("bc", 1, 3)),  # complete together: order of the list
        (["abc", "bc"], ["ab", "cd"], ("abc", 0, 3)),
        (["aab"], ["a", "a", "a", "b"], ("aab", 1, 4)),
    ],
)
def test_b004_synthetic_tokens(stops, pieces, expected):
    checker = StopStringChecker(stops)
    match = next(filter(None, map(checker.feed, pieces)))
    assert (match.stop, match.start, match.end) == expected


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], "x" * (MAX_STOP_LENGTH + 1), 5])
def test_b006_stops_that_cannot_be_are_refused(stop):
    with pytest.raises(InvalidRequestError, match="stop=") as raised:
        SamplingParams(stop=stop)
    assert raised.value.parameter == "stop"


def test_b006_number_of_stops_is_bounded():
    assert len(SamplingParams(stop=["x"] * MAX_STOP_STRINGS).stop) == MAX_STOP_STRINGS
    with pytest.raises(InvalidRequestError, match=str(MAX_STOP_STRINGS)):
        SamplingParams(stop=["x"] * 100_000)


def test_b006_none_and_empty_lists_are_no_stops_and_a_string_is_a_list_of_one():
    assert SamplingParams(stop=None).stop is None
    assert SamplingParams(stop=[]).stop is None
    assert SamplingParams(stop="END").stop == ["END"]
