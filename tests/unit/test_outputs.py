"""Flat log-probabilities read like a list of dicts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.outputs import FlatLogprobs, Logprob

ENTRIES = st.builds(
    Logprob, st.floats(-50, 0), st.integers(1, 100), st.one_of(st.none(), st.text(max_size=3))
)
POSITIONS = st.lists(st.dictionaries(st.integers(0, 50), ENTRIES, min_size=1, max_size=4))
INDICES = st.one_of(st.none(), st.integers(-12, 12))


@given(POSITIONS, INDICES, INDICES, st.sampled_from([None, 1, 2, -1]))
def test_indices_slices_and_equality(positions, start, stop, step):
    flat = FlatLogprobs(positions)
    assert len(flat) == len(positions)
    assert list(flat) == positions
    for index in range(-len(positions), len(positions)):
        assert flat[index] == positions[index]
    part = slice(start, stop, step)
    assert isinstance(flat[part], FlatLogprobs)
    assert list(flat[part]) == positions[part]
    assert flat[part] == FlatLogprobs(positions[part])
    assert flat == FlatLogprobs(positions)
    assert flat != positions


@given(POSITIONS, POSITIONS)
def test_they_grow(first, then):
    flat = FlatLogprobs(first)
    flat += FlatLogprobs(then)
    assert list(flat) == first + then
    flat.extend(first)
    assert list(flat) == first + then + first


def test_a_prompts_first_token_has_nothing():
    flat = FlatLogprobs([None, {3: Logprob(-1.0, 1, "a")}])
    assert list(flat) == [{}, {3: Logprob(-1.0, 1, "a")}]
    assert list(flat[1:]) == [{3: Logprob(-1.0, 1, "a")}]
