"""A rank finds the others."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.config.parallel import ParallelConfig, RankPlace
from tokenmill.parallel.group import SOLO, SharedMemoryGroup, TensorGroup


def join_group(
    parallel: ParallelConfig,
    place: RankPlace,
    *,
    memory_fd: int | None,
    store_address: str | None,
    tell_address: Callable[[str], None],
) -> TensorGroup:
    """The ranks that have parts of the same layers.

    `memory_fd` is of memory that they share, if they do. `store_address` is where all ranks of the
    model meet: None if they need not, and empty for the rank that opens the place, which it tells
    with `tell_address`.
    """
    process_group = None
    if store_address is not None:
        from tokenmill.parallel import distributed

        if store_address:
            store = distributed.find_store(store_address)
        else:
            store = distributed.open_store(parallel)
            tell_address(f"{parallel.master_addr}:{store.port}")
        process_group = distributed.join_world(store, parallel, place)
    if place.tp_size == 1:
        return SOLO
    if memory_fd is not None:
        return SharedMemoryGroup(memory_fd, place.tp_rank, place.tp_size)
    assert process_group is not None
    return distributed.DistributedGroup(process_group, place.tp_rank, place.tp_size)
