"""Endless repetitions at the end of an output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.timing import in_time
from tokenmill.errors import InvalidRequestError
from tokenmill.repetition import (
    MAX_PATTERN_SIZE,
    RepetitionDetectionParams,
    ends_with_repetition,
)
from tokenmill.sampling_params import SamplingParams


def brute_force(tokens, start, params):
    output = tokens[start:]
    for size in range(params.min_pattern_size, params.max_pattern_size + 1):
        repeated = output[-size:] * params.min_count
        if len(output) >= len(repeated) and output[-len(repeated) :] == repeated:
            return True
    return False


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(0, 20),
    st.integers(1, 8),
    st.integers(0, 8),
    st.integers(2, 5),
)
def test_it_is_found_just_where_it_is(tokens, start, longest, shortest, count):
    params = RepetitionDetectionParams(
        max_pattern_size=longest, min_pattern_size=min(shortest, longest), min_count=count
    )
    start = min(start, len(tokens) - 1)
    assert ends_with_repetition(tokens, start, params) == brute_force(tokens, start, params)


def test_the_prompt_does_not_count():
    params = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    assert not ends_with_repetition([5] * 10, 8, params)
    assert ends_with_repetition([5] * 11, 8, params)


def test_the_longest_search_is_quick():
    params = RepetitionDetectionParams(max_pattern_size=MAX_PATTERN_SIZE, min_count=2)
    tokens = [0, 1] * 50_000
    tokens[::2] = range(50_000)
    assert not in_time(lambda: ends_with_repetition(tokens, 0, params), 5e-3, num_tries=50)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "must have max_pattern_size"),
        (3, "must have max_pattern_size"),
        ({"max_pattern_size": 0}, "between 1 and 1024"),
        ({"max_pattern_size": 2000}, "at most 1024"),
        ({"max_pattern_size": 4, "min_pattern_size": 5}, "at most 4"),
        ({"max_pattern_size": 4, "min_count": 1}, "at least 2|between 2"),
        ({"max_pattern_size": True}, "must be an integer"),
        ({"max_pattern_size": 4, "minimum": 1}, "no argument 'minimum'"),
    ],
)
def test_values_that_make_no_sense(value, words):
    with pytest.raises(InvalidRequestError, match=words):
        SamplingParams(repetition_detection=value)


def test_a_dict_is_as_good_as_the_class():
    given_dict = SamplingParams(repetition_detection={"max_pattern_size": 4, "min_pattern_size": 0})
    same = SamplingParams(repetition_detection=RepetitionDetectionParams(max_pattern_size=4))
    assert given_dict == same
