"""Gathering the flat batch: the layouts worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.sampling import new_request
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.worker.batch import gather_batch, runs
from tokenmill.worker.inputs.host import HostInputs
from tokenmill.worker.rows import RowTable


class Gathered:
    """A batch and its tensors, as arrays."""

    def __init__(self, plan, inputs):
        self.batch = gather_batch(plan, inputs.rows)
        self.tensors = inputs.fill(self.batch, self.batch.shape)

    def __getattr__(self, name):
        if not hasattr(self.tensors, name):
            return getattr(self.batch, name)
        found = getattr(self.tensors, name)
        return tuple(t.numpy() for t in found) if isinstance(found, tuple) else found.numpy()


def gather(counts, seq_lens, *, block_size=16, num_logits=None, is_sampled=None, rows=None):
    """A batch of requests whose `counts` last tokens are computed now.

    Token t of the request in row r is 10_000 * r + t; its block b is 100 * r + b.
    """
    rows = list(range(len(counts))) if rows is None else rows
    max_len = max(seq_lens)
    table = RowTable(max(rows) + 1, max_len, block_size, num_kv_groups=1)
    for row, count, seq_len in zip(rows, counts, seq_lens, strict=True):
        request = new_request(row, token_ids=[10_000 * row + t for t in range(seq_len)])
        request.num_computed_tokens = seq_len - count
        request.block_ids = ([100 * row + b for b in range(-(-seq_len // block_size))],)
        table.add(request)
    plan = SchedulerOutput(
        step_id=0,
        req_ids=[f"r{row}" for row in rows],
        rows=rows,
        num_scheduled_tokens=list(counts),
        num_logits=num_logits or [1] * len(counts),
        is_sampled=is_sampled or [True] * len(counts),
    )
    return Gathered(plan, HostInputs(table, sum(counts)))


def test_four_requests_make_one_batch_of_ten_tokens():
    batch = gather([5, 1, 3, 1], [5, 9, 3, 20])
    assert batch.batch.shape.num_tokens == 10
    assert batch.query_start_loc.tolist() == [0, 5, 6, 9, 10]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 8, 0, 1, 2, 19]
    assert batch.input_ids.tolist() == [0, 1, 2, 3, 4, 10_008, 20_000, 20_001, 20_002, 30_019]
    assert batch.logits_indices.tolist() == [4, 5, 8, 9]


def test_two_decodes_and_a_long_prompt():
    batch = gather([1, 1, 2048], [700, 33, 2048])
    assert batch.query_start_loc.tolist() == [0, 1, 2, 2050]
    assert batch.batch.shape.max_query_len == 2048


def test_a_chunk_a_decode_and_a_prefix_hit():
    batch = gather([100, 1, 50], [5000, 200, 1050])
    assert batch.query_start_loc.tolist() == [0, 100, 101, 151]
    assert batch.batch.shape.max_query_len == 100
    assert batch.seq_lens.tolist() == [5000, 200, 1050]
    assert batch.batch.shape.max_seq_len == 5000
    assert batch.positions[[0, 99, 100, 101, 150]].tolist() == [4900, 4999, 199, 1000, 1049]


def test_dtypes_are_those_of_the_attention_metadata():
    batch = gather([2, 1], [2, 5])
    assert batch.input_ids.dtype == np.int32
    assert batch.query_start_loc.dtype == np.int32
    assert batch.seq_lens.dtype == np.int32
    assert batch.block_tables[0].dtype == np.int32
    assert batch.positions.dtype == np.int64
    assert batch.slot_mappings[0].dtype == np.int64


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_every_array_follows_its_definition(data):
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    num_reqs = data.draw(st.integers(1, 6))
    rows = data.draw(st.permutations(range(8)))[:num_reqs]
    seq_lens = [data.draw(st.integers(1, 60)) for _ in rows]
    counts = [data.draw(st.integers(1, length)) for length in seq_lens]
    num_logits = [data.draw(st.integers(0, count)) for count in counts]
    is_sampled = [bool(count) and data.draw(st.booleans()) for count in num_logits]
    batch = gather(
        counts,
        seq_lens,
        block_size=block_size,
        num_logits=num_logits,
        is_sampled=is_sampled,
        rows=rows,
    )
    tokens = [
        (row, position)
        for row, length, count in zip(rows, seq_lens, counts, strict=True)
        for position in range(length - count, length)
    ]
    assert batch.input_ids.tolist() == [10_000 * row + position for row, position in tokens]
    assert batch.positions.tolist() == [position for _, position in tokens]
    assert batch.slot_mappings[0].tolist() == [
        (100 * row + position // block_size) * block_size + position % block_size
        for row, position in tokens
    ]
    for row, length, blocks in zip(rows, seq_lens, batch.block_tables[0], strict=True):
        used = -(-length // block_size)
        assert blocks[:used].tolist() == [100 * row + b for b in range(used)]
    ends = np.cumsum(counts)
    logits = [i for end, n in zip(ends, num_logits, strict=True) for i in range(end - n, end)]
    assert batch.logits_indices.tolist() == logits
    assert batch.logits_start.tolist() == [0, *np.cumsum(num_logits)]
    assert batch.logits_positions.tolist() == [tokens[i][1] for i in logits]
    assert batch.sampled_positions.tolist() == [
        length for length, sampled in zip(seq_lens, is_sampled, strict=True) if sampled
    ]
    assert batch.sampled_indices.tolist() == [
        end - 1 for end, sampled in zip(ends, is_sampled, strict=True) if sampled
    ]


def test_buffers_are_reused_by_the_next_step():
    table = RowTable(2, 64, 4, num_kv_groups=2)
    inputs = HostInputs(table, 64)
    memory = set()
    for row in range(2):
        request = new_request(row, token_ids=[1, 2, 3])
        request.block_ids = ([5 + row], [8 + row])
        table.add(request)
        plan = SchedulerOutput(row, ["a"], [row], [3], [1], [True])
        batch = Gathered(plan, inputs)
        assert [slots[0] for slots in batch.slot_mappings] == [(5 + row) * 4, (8 + row) * 4]
        arrays = [batch.input_ids, batch.positions, batch.seq_lens, batch.query_start_loc]
        memory.add(tuple(a.ctypes.data for a in [*arrays, *batch.slot_mappings]))
    assert len(memory) == 1


def test_a_plan_past_the_known_tokens_is_a_broken_invariant():
    table = RowTable(1, 64, 4, num_kv_groups=1)
    table.add(new_request(0, token_ids=[1, 2, 3]))
    with pytest.raises(AssertionError, match="past known tokens"):
        gather_batch(SchedulerOutput(0, ["a"], [0], [4], [1], [True]), table)


def test_runs_of_nothing():
    assert runs(np.array([3, 4]), np.array([0, 0])).tolist() == []
    assert runs(np.empty(0, np.int64), np.empty(0, np.int64)).tolist() == []
