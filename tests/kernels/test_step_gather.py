"""Steps gathered natively hold what numpy gathers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.kernels import native
from tokenmill.kernels.step_gather import NumpyStepGather, StepArrays, step_gather

MAX_SEQS, MAX_LEN, MAX_TOKENS, BLOCK_SIZE = 5, 40, 120, 8


def make_arrays(num_groups, *, has_offsets=False):
    rng = np.random.default_rng(3)
    max_blocks = MAX_LEN // BLOCK_SIZE

    def ids(*shape):
        return rng.integers(1, 1 << 20, shape, np.int32)

    return StepArrays(
        token_ids=ids(MAX_SEQS, MAX_LEN),
        block_ids=[ids(MAX_SEQS, max_blocks) for _ in range(num_groups)],
        block_size=BLOCK_SIZE,
        query_start_loc=np.zeros(MAX_SEQS + 1, np.int32),
        seq_lens=np.zeros(MAX_SEQS, np.int32),
        input_ids=np.zeros(MAX_TOKENS, np.int32),
        positions=np.zeros(MAX_TOKENS, np.int64),
        block_tables=[np.zeros((MAX_SEQS, max_blocks), np.int32) for _ in range(num_groups)],
        slot_mappings=[np.zeros(MAX_TOKENS, np.int64) for _ in range(num_groups)],
        position_offsets=rng.integers(-9, 9, MAX_SEQS) if has_offsets else None,
    )


def numbers(*values):
    return np.array(values, np.int64)


@settings(deadline=None)
@given(st.data())
def test_both_ways_fill_the_same(data):
    num_groups = data.draw(st.integers(1, 2))
    rows = data.draw(st.permutations(range(MAX_SEQS)))[: data.draw(st.integers(1, MAX_SEQS))]
    counts = [data.draw(st.integers(1, 24)) for _ in rows]
    computed = [data.draw(st.integers(0, MAX_LEN - count)) for count in counts]
    step = (numbers(*rows), numbers(*counts), numbers(*computed))
    has_offsets = data.draw(st.booleans())
    plain, found = (make_arrays(num_groups, has_offsets=has_offsets) for _ in range(2))
    NumpyStepGather(plain).fill(*step)
    step_gather(found).fill(*step)
    num_tokens, num_reqs = sum(counts), len(rows)
    offset = 0 if plain.position_offsets is None else plain.position_offsets[rows[0]]
    assert plain.positions[0] == computed[0] + offset
    for name in ("query_start_loc", "seq_lens", "input_ids", "positions"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(found, name))
    for mine, theirs in zip(found.slot_mappings, plain.slot_mappings, strict=True):
        np.testing.assert_array_equal(mine[:num_tokens], theirs[:num_tokens])
    for mine, theirs in zip(found.block_tables, plain.block_tables, strict=True):
        for req in range(num_reqs):
            used = -(-(computed[req] + counts[req]) // BLOCK_SIZE)
            np.testing.assert_array_equal(mine[req, :used], theirs[req, :used])


def test_steps_that_would_leave_the_tables_are_refused():
    if not native.is_available():
        assert isinstance(step_gather(make_arrays(1)), NumpyStepGather)
        return
    gather = step_gather(make_arrays(1))
    for step, words in [
        ((numbers(MAX_SEQS), numbers(1), numbers(0)), "no such row"),
        ((numbers(-1), numbers(1), numbers(0)), "no such row"),
        ((numbers(0), numbers(2), numbers(MAX_LEN - 1)), "beyond the row"),
        ((numbers(0), numbers(1), numbers(-1)), "beyond the row"),
        ((numbers(*[0] * 4), numbers(*[MAX_LEN] * 4), numbers(*[0] * 4)), "too many tokens"),
        ((numbers(*[0] * 6), numbers(*[1] * 6), numbers(*[0] * 6)), "too many requests"),
        ((numbers(0, 1), numbers(1), numbers(0)), "equally long"),
    ]:
        with pytest.raises(ValueError, match=words):
            gather.fill(*step)
    arrays = dataclasses.replace(make_arrays(1), position_offsets=np.zeros(MAX_SEQS + 1, np.int64))
    with pytest.raises(ValueError, match="one position offset a row"):
        step_gather(arrays)
