"""A step's inputs from the tables of requests, against loops over requests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tokenmill.kernels.gpu import inputs_reference as reference
from tokenmill.kernels.gpu.inputs import (
    gather_block_table,
    map_slots,
    prepare_inputs,
    prepare_step,
)
from tokenmill.kernels.gpu.tables import commit_tokens, gather_rows, write_segments

POISON = -77
MAX_SEQS, MAX_LEN = 40, 700


@dataclass
class Requests:
    """Some rows of the tables, each with so many tokens before the step and in it."""

    rows: list[int]
    num_computed: list[int]
    num_scheduled: list[int]
    padded_tokens: int = 0


CASES = {
    "nothing": Requests([], [], []),
    "padding only": Requests([-1, -1], [0, 0], [0, 0], padded_tokens=5),
    "no requests": Requests([], [], [], padded_tokens=3),
    "a token": Requests([3], [17], [1]),
    "a prompt over tiles": Requests([39], [0], [300]),
    "the last of a longest row": Requests([0], [MAX_LEN - 1], [1]),
    "decoding": Requests(list(range(39, 2, -1)), [3 * i for i in range(37)], [1] * 37),
    "mixed": Requests([5, 1, 30, 8], [0, 64, 128, 31], [129, 1, 3, 200], padded_tokens=40),
    "empty ranges": Requests([4, 2, 9, 7, -1], [9, 0, 50, 1, 0], [0, 5, 0, 2, 0], padded_tokens=9),
    "padded requests with tokens": Requests([6, -1, 11, -1], [4, 0, 12, 0], [1, 1, 1, 1]),
    "padded requests behind": Requests([1, 2] + [-1] * 30, [5, 600] + [0] * 30, [1, 1] + [0] * 30),
}


@dataclass
class Step:
    rows: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_tokens: int

    @classmethod
    def of(cls, requests: Requests, device: str) -> Step:
        def int32(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        starts, ends = [0], []
        for row, computed, scheduled in zip(
            requests.rows, requests.num_computed, requests.num_scheduled, strict=True
        ):
            starts.append(starts[-1] + scheduled)
            ends.append(0 if row < 0 else computed + scheduled)
        return cls(
            int32(requests.rows), int32(starts), int32(ends), starts[-1] + requests.padded_tokens
        )


def tables(device: str, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token and block ids; block ids are so large that slots need 64 bits."""
    token_ids = torch.randint(0, 2**31 - 1, (MAX_SEQS, MAX_LEN), device=device).int()
    max_blocks = -(-MAX_LEN // block_size)
    block_ids = torch.randint(0, 2**31 - 1, (MAX_SEQS, max_blocks), device=device).int()
    return token_ids, block_ids


def poisoned(length: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.full((length,), POISON, dtype=dtype, device=device)


def expected_tokens(
    requests: Requests, token_ids: torch.Tensor, block_ids: torch.Tensor, block_size: int
) -> tuple[list[int], list[int], list[int]]:
    """(ids, positions, slots), token by token."""
    ids, positions, slots = [], [], []
    for row, computed, scheduled in zip(
        requests.rows, requests.num_computed, requests.num_scheduled, strict=True
    ):
        for position in range(computed, computed + scheduled):
            is_real = row >= 0
            ids.append(int(token_ids[row, position]) if is_real else 0)
            positions.append(position if is_real else 0)
            block = int(block_ids[row, position // block_size])
            slots.append(block * block_size + position % block_size if is_real else -1)
    padding = requests.padded_tokens
    return ids + [0] * padding, positions + [0] * padding, slots + [-1] * padding


def assert_block_table(
    requests: Requests, block_ids: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> None:
    for i, row in enumerate(requests.rows):
        expected = torch.full_like(block_table[i], POISON)
        used = -(-(requests.num_computed[i] + requests.num_scheduled[i]) // block_size)
        if row >= 0:
            expected[:used] = block_ids[row, :used]
        assert block_table[i].equal(expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("is_fused", [True, False])
def test_prepared_step(device: str, case: str, block_size: int, is_fused: bool) -> None:
    requests = CASES[case]
    step = Step.of(requests, device)
    token_ids, block_ids = tables(device, block_size)
    input_ids = poisoned(step.num_tokens, torch.int32, device)
    positions = poisoned(step.num_tokens, torch.int64, device)
    slots = poisoned(step.num_tokens, torch.int64, device)
    block_table = torch.full(
        (len(requests.rows), block_ids.shape[1]), POISON, dtype=torch.int32, device=device
    )
    if is_fused:
        prepare_step(
            step.rows, step.query_start_loc, step.seq_lens, token_ids, block_ids, input_ids,
            positions, slots, block_table, block_size,
        )  # fmt: skip
    else:
        prepare_inputs(
            step.rows, step.query_start_loc, step.seq_lens, token_ids, input_ids, positions
        )
        map_slots(step.rows, step.query_start_loc, positions, block_ids, slots, block_size)
        gather_block_table(step.rows, step.seq_lens, block_ids, block_table, block_size)

    expected = expected_tokens(requests, token_ids.cpu(), block_ids.cpu(), block_size)
    assert (input_ids.tolist(), positions.tolist(), slots.tolist()) == expected
    assert_block_table(requests, block_ids, block_table, block_size)


@pytest.mark.parametrize("seed", range(6))
def test_random_steps(device: str, seed: int) -> None:
    """Any number of requests, also around powers of two, where bisection has its corners."""
    torch.manual_seed(seed)
    num_reqs = int(torch.randint(1, MAX_SEQS + 1, ()))
    computed = torch.randint(0, 400, (num_reqs,)).tolist()
    scheduled = torch.randint(0, 12, (num_reqs,)).tolist()
    rows = torch.randperm(MAX_SEQS)[:num_reqs].tolist()
    requests = Requests(rows, computed, scheduled, padded_tokens=seed)
    step = Step.of(requests, device)
    token_ids, block_ids = tables(device, 16)
    input_ids = poisoned(step.num_tokens, torch.int32, device)
    positions = poisoned(step.num_tokens, torch.int64, device)
    slots = poisoned(step.num_tokens, torch.int64, device)
    block_table = torch.full((num_reqs, 30), POISON, dtype=torch.int32, device=device)
    prepare_step(
        step.rows, step.query_start_loc, step.seq_lens, token_ids, block_ids, input_ids,
        positions, slots, block_table, 16,
    )  # fmt: skip
    expected = expected_tokens(requests, token_ids.cpu(), block_ids.cpu(), 16)
    assert (input_ids.tolist(), positions.tolist(), slots.tolist()) == expected
    assert_block_table(requests, block_ids, block_table, 16)


def test_a_recorded_step_takes_other_contents(device: str) -> None:
    """In a CUDA graph where there is a GPU: shapes are fixed, everything else is read anew."""
    token_ids, block_ids = tables(device, 16)
    names = ("decoding", "padded requests behind", "mixed")
    steps = [Step.of(CASES[name], device) for name in names]
    rows = torch.full((40,), -1, dtype=torch.int32, device=device)
    query_start_loc = torch.zeros(41, dtype=torch.int32, device=device)
    seq_lens = torch.zeros(40, dtype=torch.int32, device=device)
    input_ids = torch.zeros(400, dtype=torch.int32, device=device)
    positions, slots = (torch.zeros(400, dtype=torch.int64, device=device) for _ in range(2))
    block_table = torch.zeros((40, 60), dtype=torch.int32, device=device)

    def prepare() -> None:
        prepare_step(
            rows, query_start_loc, seq_lens, token_ids, block_ids, input_ids, positions, slots,
            block_table, 16,
        )  # fmt: skip

    prepare()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            prepare()
        prepare = graph.replay

    for name, step in zip(names, steps, strict=True):
        num_reqs = len(step.rows)
        rows.fill_(-1)[:num_reqs] = step.rows
        query_start_loc.fill_(int(step.query_start_loc[-1]))[:num_reqs] = step.query_start_loc[:-1]
        seq_lens.zero_()[:num_reqs] = step.seq_lens
        for poisoned_one in (input_ids, positions, slots, block_table):
            poisoned_one.fill_(POISON)
        prepare()
        ids, places, there = expected_tokens(CASES[name], token_ids.cpu(), block_ids.cpu(), 16)
        padding = 400 - len(ids)
        assert input_ids.tolist() == ids + [0] * padding
        assert positions.tolist() == places + [0] * padding
        assert slots.tolist() == there + [-1] * padding
        assert_block_table(CASES[name], block_ids, block_table[:num_reqs], 16)
        assert (block_table[num_reqs:] == POISON).all()


def test_a_long_block_table(device: str) -> None:
    """More blocks than a program copies at a time, and a narrower table."""
    block_ids = torch.arange(2 * 5000, dtype=torch.int32, device=device).view(2, 5000)
    rows = torch.tensor([1, 0], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([3001, 17], dtype=torch.int32, device=device)
    block_table = torch.full((2, 3002), POISON, dtype=torch.int32, device=device)
    gather_block_table(rows, seq_lens, block_ids, block_table, 1)
    assert block_table[0, :3001].equal(block_ids[1, :3001])
    assert block_table[1, :17].equal(block_ids[0, :17])
    assert (block_table[0, 3001:] == POISON).all()
    assert (block_table[1, 17:] == POISON).all()


@pytest.mark.parametrize("lengths", [[1], [700], [5, 0, 600, 1, 512, 0], [1] * 40, [0, 0, 3]])
def test_segments(device: str, lengths: list[int]) -> None:
    data = torch.randint(0, 2**31 - 1, (sum(lengths) + 7,), device=device).int()  # 7 are padding
    table = poisoned(4000, torch.int32, device)
    expected = table.clone()
    starts, place, first = [], 3, 0
    for length in reversed(lengths):  # not in order of the table
        starts.insert(0, place)
        place += length + 2
    for length, start in zip(lengths, starts, strict=True):
        expected[start : start + length] = data[first : first + length]
        first += length
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    dst_start = torch.tensor(starts, device=device)
    write_segments(table, data, dst_start, bounds)
    assert table.equal(expected)


def test_no_segments(device: str) -> None:
    table = poisoned(10, torch.int32, device)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    write_segments(
        table,
        torch.ones(5, dtype=torch.int32, device=device),
        nothing.long(),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    write_segments(table, nothing, nothing.long(), torch.zeros(1, dtype=torch.int32, device=device))
    assert (table == POISON).all()


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 300])
@pytest.mark.parametrize("sampled_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("has_due", [False, True])
def test_committed_tokens(
    device: str, num_tokens: int, sampled_dtype: torch.dtype, has_due: bool
) -> None:
    places = torch.randperm(400 * 12, device=device)[:num_tokens]
    rows, positions = (places // 12).int(), places % 12
    rows[1:2] = -1
    positions[2:3] = 12  # a request at its longest: its last token has no place
    positions[3:4] = -1
    sampled = torch.randint(0, 2**31 - 1, (num_tokens,), device=device).to(sampled_dtype)
    is_due = torch.rand(num_tokens, device=device) < 0.6
    token_ids = torch.full((400, 12), POISON, dtype=torch.int32, device=device)
    expected = token_ids.clone()
    for i in range(num_tokens):
        if (is_due[i] or not has_due) and i not in (1, 2, 3):
            expected[rows[i], positions[i]] = sampled[i]
    commit_tokens(token_ids, rows, positions, sampled, is_due if has_due else None)
    assert token_ids.equal(expected)


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (9, 100), (4, 1500)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_gathered_rows(device: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    table = (torch.randn(20, shape[1] + 3, device=device) * 100).to(dtype)[:, : shape[1]]
    indices = torch.randint(0, 20, shape[:1], device=device)
    indices[1:2] = -1
    out = torch.full((shape[0], shape[1] + 2), POISON, dtype=dtype, device=device)
    expected = out.clone()
    for i, index in enumerate(indices.tolist()):
        if index >= 0:
            expected[i, : shape[1]] = table[index]
    gather_rows(table, indices, out[:, : shape[1]])
    assert out.equal(expected)


def test_gathered_rows_take_another_dtype(device: str) -> None:
    table = torch.randn(6, 40, device=device).bfloat16()
    indices = torch.tensor([5, 0, 5], dtype=torch.int32, device=device)
    out = torch.full((3, 40), float("nan"), device=device)
    gather_rows(table, indices, out)
    assert out.equal(table.float()[indices.long()])


@pytest.mark.parametrize("case", CASES)
def test_references_agree_with_loops(case: str) -> None:
    requests = CASES[case]
    step = Step.of(requests, "cpu")
    token_ids, block_ids = tables("cpu", 16)
    input_ids = poisoned(step.num_tokens, torch.int32, "cpu")
    positions = poisoned(step.num_tokens, torch.int64, "cpu")
    slots = poisoned(step.num_tokens, torch.int64, "cpu")
    block_table = torch.full((len(requests.rows), 50), POISON, dtype=torch.int32)
    torch.ops.tokenmill.prepare_step(
        step.rows, step.query_start_loc, step.seq_lens, token_ids, block_ids, input_ids,
        positions, slots, block_table, 16,
    )  # fmt: skip
    expected = expected_tokens(requests, token_ids, block_ids, 16)
    assert (input_ids.tolist(), positions.tolist(), slots.tolist()) == expected
    assert_block_table(requests, block_ids, block_table, 16)


def test_references_of_the_tables_agree_with_kernels(device: str) -> None:
    """The kernels were compared with loops above."""
    token_ids, _ = tables(device, 16)
    rows = torch.tensor([3, -1, 0, 7], dtype=torch.int32, device=device)
    positions = torch.tensor([699, 5, 700, 2], device=device)
    sampled = torch.tensor([11, 12, 13, 14], device=device)
    is_due = torch.tensor([True, True, True, False], device=device)
    dst_start = torch.tensor([2000, 900], device=device)
    src_start = torch.tensor([0, 3, 4], dtype=torch.int32, device=device)
    results = []
    for commit, write, gather in (
        (commit_tokens, write_segments, gather_rows),
        (
            reference.commit_tokens_reference,
            reference.write_segments_reference,
            reference.gather_rows_reference,
        ),
    ):
        table = token_ids.clone()
        commit(table, rows, positions, sampled, is_due)
        write(table.view(-1), sampled.int(), dst_start, src_start)
        out = torch.full((4, MAX_LEN), POISON, dtype=torch.int32, device=device)
        gather(table, rows, out)
        results.append((table, out))
    assert results[0][0].equal(results[1][0])
    assert results[0][1].equal(results[1][1])
    assert not results[0][0].equal(token_ids)
