"""Sums and joins in shared memory: what ranks get, bit for bit, and what happens when one fails."""

from __future__ import annotations

import os

import pytest
import torch

from helpers.ranks import together
from tokenmill.kernels import native, shared_group
from tokenmill.kernels.rank_memory import SLOT_BYTES, create_memory
from tokenmill.kernels.shared_group import sum_in_order

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")


def parts(size, *shape):
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(shape, generator=generator) * 10.0**rank for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 64), (7, 96), (3, SLOT_BYTES // 4), (33, 4099)])
def test_a_sum_is_that_of_the_ranks_in_their_order(size, shape):
    given = parts(size, *shape)
    expected = sum_in_order(given)
    for found in together(size, lambda group: group.all_reduce(given[group.rank].clone())):
        assert torch.equal(found, expected)


def test_a_row_has_the_same_bits_among_others_and_alone():
    given = parts(3, 50, 640)
    whole = together(3, lambda group: group.all_reduce(given[group.rank].clone()))[0]
    row = together(3, lambda group: group.all_reduce(given[group.rank][17:18].clone()))[0]
    assert torch.equal(whole[17:18], row)


@pytest.mark.parametrize("widths", [[32, 32], [64, 32, 5], [20_000, 70_000]])
@pytest.mark.parametrize("num_rows", [1, 6])
def test_columns_stand_side_by_side(widths, num_rows):
    given = [torch.randn(num_rows, width) for width in widths]
    found = together(len(widths), lambda group: group.all_gather(given[group.rank], widths))
    for each in found:
        assert torch.equal(each, torch.cat(given, dim=1))


def test_many_operations_in_a_row():
    def work(group):
        total = torch.zeros(1, 32)
        for step in range(2000):
            total += group.all_reduce(torch.full((1, 32), float(step + group.rank)))
            group.all_gather(torch.ones(2, 8), [8, 8])
        return total

    first, second = together(2, work)
    assert torch.equal(first, second)
    assert first[0, 0] == sum(2 * step + 1 for step in range(2000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_is_found_by_the_rank_that_has_it(dtype):
    table = torch.randn(70, 32).to(dtype)
    ids = torch.tensor([0, 31, 32, 69, 40, 5], dtype=torch.int32)
    bounds = [range(32), range(32, 70)]

    def work(group):
        part = bounds[group.rank]
        own = table[part.start : part.stop]
        return group.lookup(ids, part, lambda local: own[local.long()])

    for found in together(2, work):
        assert found.dtype == dtype
        assert torch.equal(found, table[ids.long()])


def test_a_call_can_be_recorded_and_serves_fewer_rows():
    def work(group):
        program = native.module().Program(8)
        x = torch.zeros(8, 16)
        program.begin()
        group.all_reduce(x)
        joined = group.all_gather(x, [16, 16])
        program.end()
        x[:3] = 1.0 + group.rank
        program.replay(3)
        return x.clone(), joined.clone()

    for x, joined in together(2, work):
        assert torch.equal(x[:3], torch.full((3, 16), 3.0))
        assert torch.equal(x[3:], torch.zeros(5, 16))
        assert torch.equal(joined[:3], torch.full((3, 32), 3.0))


def test_ranks_that_do_not_do_the_same_find_out():
    def work(group):
        group.all_reduce(torch.zeros(1, 32))
        group.all_reduce(torch.zeros(1 + group.rank, 32))

    first, second = together(2, work)
    assert isinstance(first, RuntimeError)
    assert isinstance(second, RuntimeError)


@pytest.mark.parametrize("marks", [[(7, 0), (7, 1)], [(8, 0), (7, 0)]])
def test_ranks_in_different_steps_find_out(marks):
    """One has failed in a step, and begins it again, when the other is in its middle or in the
    next: sizes are the same.
    """

    def work(group):
        group.begin(*(marks[group.rank]))
        group.all_reduce(torch.zeros(1, 32))

    assert all(isinstance(each, RuntimeError) for each in together(2, work))


def test_whoever_waits_for_a_rank_that_gives_up_fails():
    def work(group):
        if group.rank == 1:
            group.break_up()
            return group.is_broken
        group.all_reduce(torch.zeros(1, 32))
        return None

    first, second = together(2, work)
    assert isinstance(first, RuntimeError)
    assert "failed" in str(first)
    assert second is True


def test_memory_of_another_size_is_refused():
    fd = create_memory(3)
    with pytest.raises(ValueError, match="memory must be"):
        shared_group.SharedGroup(fd, 0, 2)
    os.close(fd)
