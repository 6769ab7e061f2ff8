"""Ranks of a model in threads of one process: what they compute needs no processes to be tested."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from tokenmill.kernels.rank_memory import create_memory
from tokenmill.parallel.group import SharedMemoryGroup

T = TypeVar("T")


def together(size: int, work: Callable[[SharedMemoryGroup], T]) -> list[T | RuntimeError]:
    """`work(group)` of each rank, in threads of their own; results, or what was raised, by rank."""
    fd = create_memory(size)
    groups = [SharedMemoryGroup(fd, rank, size) for rank in range(size)]
    results: list[T | RuntimeError] = [RuntimeError("not run")] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(groups[rank])
        except RuntimeError as error:
            results[rank] = error
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            errors.append(error)
            groups[rank].break_up()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank waits for ever"
    os.close(fd)
    if errors:
        raise errors[0]
    return results
