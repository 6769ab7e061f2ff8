"""Low-rank adapters: the native kernel against float64, and the torch reference beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import isas
from tokenmill import _native
from tokenmill.kernels import arena
from tokenmill.kernels.gemm import quantize_rows
from tokenmill.kernels.lora import (
    AdapterRows,
    AdapterTables,
    LowRank,
    add_adapters,
    add_adapters_reference,
    pack_columns,
    padded_rank,
)

NUM_SLOTS = 3
DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 4e-6}


@pytest.fixture(params=isas.OF_ROWS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    with isas.active(request.param):
        yield


def low_rank(rank: int, depth: int, width: int, dtype: torch.dtype) -> LowRank:
    a = torch.randn(rank, depth) / depth**0.5
    b = torch.randn(width, rank) / rank**0.5
    return LowRank(a.to(dtype), b.to(dtype), 1.5 - 1 / rank)


def tables_of(
    adapters: Sequence[Sequence[LowRank | None]], depth: int, widths: Sequence[int]
) -> AdapterTables:
    ranks = [part.rank for parts in adapters for part in parts if part is not None]
    dtype = next(p.a.dtype for parts in adapters for p in parts if p is not None)
    tables = AdapterTables(len(adapters), max(ranks), depth, widths, dtype)
    for slot, parts in enumerate(adapters):
        packed = [None if p is None else replace(p, b=pack_columns(p.b)) for p in parts]
        tables.put(slot, packed)
    return tables


def exact(
    slots: Sequence[int],
    adapters: Sequence[Sequence[LowRank | None]],
    widths: Sequence[int],
    x: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """In float64, not rounded."""
    result = out.double().clone()
    for row, slot in enumerate(slots):
        start = 0
        for width, part in zip(widths, adapters[slot] if slot >= 0 else (), strict=False):
            if part is not None:
                low = part.a.double() @ x[row].double()
                result[row, start : start + width] += part.scale * (part.b.double() @ low)
            start += width
    return result


def rows_of(slot_of_row: Sequence[int], num_slots: int = NUM_SLOTS) -> AdapterRows:
    """The batch has one token of each row, in order."""
    rows = AdapterRows(np.array(slot_of_row, np.int32), num_slots)
    rows.fill(np.arange(len(slot_of_row)), np.ones(len(slot_of_row), np.int64))
    return rows


CASES = [
    (0, 40, (33,), (1,)),
    (1, 1, (1,), (1,)),
    (5, 70, (64, 20, 31), (3, 8)),
    (23, 300, (160, 96), (8, 64)),
    (40, 96, (700,), (5,)),
]


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "depth", "widths", "ranks"), CASES)
def test_rows_of_several_adapters(
    n: int,
    depth: int,
    widths: tuple[int, ...],
    ranks: tuple[int, ...],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> None:
    adapters = [
        [
            None if (slot + part) % 3 == 2 else low_rank(ranks[slot % len(ranks)], depth, w, dtype)
            for part, w in enumerate(widths)
        ]
        for slot in range(NUM_SLOTS)
    ]
    adapters[0][0] = low_rank(ranks[-1], depth, widths[0], dtype)
    slots = [int(torch.randint(-1, NUM_SLOTS, ())) for _ in range(n)]
    x = torch.randn(n, depth + 3).to(dtype)[:, :depth]  # rows that lie apart
    before = torch.randn(n, sum(widths) + 5).to(out_dtype)
    tables = tables_of(adapters, depth, widths)
    wanted = exact(slots, adapters, widths, x, before[:, : sum(widths)])
    results = []
    for num_threads in (1, 3):
        _native.set_num_threads(num_threads)
        wide = before.clone()
        out = wide[:, : sum(widths)]
        add_adapters(rows_of(slots), tables, x, out)
        results.append(out)
        bound = TOLERANCE[out_dtype] * (1 + wanted.abs())
        assert ((out.double() - wanted).abs() <= bound).all()
        assert torch.equal(wide[:, sum(widths) :], before[:, sum(widths) :])
        without = [row for row, slot in enumerate(slots) if slot < 0]
        assert torch.equal(out[without], before[without, : sum(widths)])
    assert torch.equal(*results)
    for row, slot in enumerate(slots):  # alone
        alone = before[row : row + 1, : sum(widths)].clone()
        add_adapters(rows_of([slot]), tables, x[row : row + 1], alone)
        assert torch.equal(alone[0], results[0][row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantised_rows_stand_for_their_values(dtype: torch.dtype) -> None:
    n, depth, width = 21, 96, 50
    adapters = [[low_rank(6, depth, width, dtype)]]
    x = torch.randn(n, depth)
    quantized = quantize_rows(x)
    values = quantized.codes.float().view(n, -1, 32) * quantized.scales.unsqueeze(-1)
    slots = [0 if row % 2 else -1 for row in range(n)]
    out = torch.randn(n, width)
    wanted = exact(slots, adapters, (width,), values.view(n, depth), out)
    add_adapters(rows_of(slots, 1), tables_of(adapters, depth, (width,)), quantized, out)
    torch.testing.assert_close(out.double(), wanted, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_gives_the_same(dtype: torch.dtype) -> None:
    n, depth, widths = 13, 64, (40, 24)
    adapters = [
        [low_rank(4, depth, 40, dtype), None],
        [low_rank(2, depth, 40, dtype), low_rank(7, depth, 24, dtype)],
    ]
    slots = torch.tensor([-1, 0, 1, 1, 0, -1, 0, 0, 0, 0, 0, 0, 0])
    x, before = torch.randn(n, depth).to(dtype), torch.randn(n, 64).to(dtype)
    out = before.clone()
    add_adapters_reference(slots, adapters, widths, x, out)
    wanted = exact(slots.tolist(), adapters, widths, x, before)
    torch.testing.assert_close(out.double(), wanted, rtol=8e-3, atol=8e-3)
    alone = before[6:7].clone()
    add_adapters_reference(slots[6:7], adapters, widths, x[6:7], alone)
    assert torch.equal(alone[0], out[6])


def test_a_slot_takes_another_adapter() -> None:
    depth, width = 48, 40
    first = low_rank(7, depth, width, torch.float32)
    second = low_rank(3, depth, width, torch.float32)
    tables = tables_of([[first]], depth, (width,))
    tables.put(0, [replace(second, b=pack_columns(second.b))])
    x, out = torch.randn(2, depth), torch.zeros(2, width)
    add_adapters(rows_of([0, -1], 1), tables, x, out)
    wanted = exact([0, -1], [[second]], (width,), x, torch.zeros(2, width))
    torch.testing.assert_close(out.double(), wanted, rtol=4e-6, atol=4e-6)
    tables.put(0, [None])
    out = torch.ones(2, width)
    add_adapters(rows_of([0, 0], 1), tables, x, out)
    assert torch.equal(out, torch.ones(2, width))


def test_rows_are_those_of_requests() -> None:
    slot_of_row = np.array([1, -1, 0], np.int32)
    rows = AdapterRows(slot_of_row, 2)
    adapters = [[low_rank(2, 16, 20, torch.float32)], [low_rank(1, 16, 20, torch.float32)]]
    tables = tables_of(adapters, 16, (20,))
    x = torch.randn(9, 16)
    for order, counts in (([2, 1, 0], [3, 4, 2]), ([0], [1]), ([1, 2], [5, 4])):
        rows.fill(np.array(order), np.array(counts))
        slots = [int(slot_of_row[r]) for r, c in zip(order, counts, strict=True) for _ in range(c)]
        n = len(slots)
        out = torch.zeros(n, 20)
        add_adapters(rows, tables, x[:n], out)
        wanted = exact(slots, adapters, (20,), x[:n], torch.zeros(n, 20))
        torch.testing.assert_close(out.double(), wanted, rtol=4e-6, atol=4e-6)
    rows.clear()
    out = torch.zeros(2, 20)
    add_adapters(rows, tables, x[:2], out)
    assert not out.any()


def test_a_recorded_call_reads_the_rows_of_its_step() -> None:
    adapters = [[low_rank(3, 32, 40, torch.bfloat16)]]
    tables = tables_of(adapters, 32, (40,))
    slot_of_row = np.array([0, -1], np.int32)
    rows = AdapterRows(slot_of_row, 1)
    x, out = torch.randn(8, 32).bfloat16(), torch.zeros(8, 40)
    program, memory = _native.Program(8), arena.Arena()
    with arena.allocate_from(memory):
        program.begin()
        add_adapters(rows, tables, x, out)
        program.end()
    assert program.num_calls == 1
    for counts in ([2, 3], [5, 1]):
        rows.fill(np.array([0, 1]), np.array(counts))
        out.zero_()
        program.replay(sum(counts))
        wanted = torch.zeros(8, 40)
        add_adapters(rows, tables, x[: sum(counts)], wanted[: sum(counts)])
        assert torch.equal(out, wanted)
        assert out[: counts[0]].any()
        assert not out[counts[0] :].any()


def test_what_does_not_fit_is_refused() -> None:
    rows = AdapterRows(np.array([0, -2, 5], np.int32), 1)
    one = np.ones(1, np.int64)
    for row in (1, 2, 3, -1):
        with pytest.raises(ValueError, match="adapters"):
            rows.fill(np.array([row]), one)
    tables = AdapterTables(1, 3, 16, (20,), torch.float32)
    assert tables.max_rank == padded_rank(3) == 4
    rows.fill(np.array([0]), np.full(1, 3))
    with pytest.raises(ValueError, match="another step"):
        add_adapters(rows, tables, torch.zeros(2, 16), torch.zeros(2, 20))
    with pytest.raises(ValueError, match="out"):
        add_adapters(rows, tables, torch.zeros(3, 16), torch.zeros(3, 21))
    with pytest.raises(ValueError, match="x"):
        add_adapters(rows, tables, torch.zeros(3, 17), torch.zeros(3, 20))
    other = AdapterRows(np.zeros(1, np.int32), 2)
    with pytest.raises(ValueError, match="slots"):
        add_adapters(other, tables, torch.zeros(1, 16), torch.zeros(1, 20))
