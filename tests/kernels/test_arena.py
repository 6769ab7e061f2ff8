"""Memory of a recorded step: whose is shared, and when."""

from __future__ import annotations

import torch

from tokenmill.kernels.arena import Arena, allocate_from, empty


def test_a_buffer_is_lent_again_once_no_tensor_lies_in_it() -> None:
    arena = Arena()
    whole = arena.empty((4, 8), torch.float32)
    address, row = whole.data_ptr(), whole[3:]
    assert (address % 64, whole.shape, whole.dtype) == (0, (4, 8), torch.float32)
    del whole
    assert arena.empty((4, 8), torch.float32).data_ptr() != address  # the row is in it still
    assert arena.num_bytes == 2 * 4 * 8 * 4
    del row
    smaller = arena.empty((3,), torch.bfloat16)
    assert smaller.data_ptr() == address
    assert arena.num_bytes == 2 * 4 * 8 * 4


def test_the_smallest_buffer_that_fits_is_taken() -> None:
    arena = Arena()
    large, small = arena.empty((100,), torch.uint8), arena.empty((10,), torch.uint8)
    addresses = large.data_ptr(), small.data_ptr()
    del large, small
    found = arena.empty((10,), torch.uint8), arena.empty((5,), torch.uint8)
    assert (found[1].data_ptr(), found[0].data_ptr()) == addresses
    larger = arena.empty((101,), torch.uint8)
    assert arena.num_bytes == 100 + 10 + len(larger)


def test_kernels_take_memory_of_the_arena_inside_the_block() -> None:
    arena = Arena()
    with allocate_from(arena):
        inside = empty(2, 3, dtype=torch.int32)
    assert empty(2, 3, dtype=torch.int32).shape == inside.shape
    assert arena.num_bytes == inside.nbytes
