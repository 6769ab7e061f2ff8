"""Starts the processes of the ranks on this machine, and ends them."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill.config.parallel import ParallelConfig
from tokenmill.executor.lifeline import how_it_ended, start_child
from tokenmill.kernels import native
from tokenmill.kernels.rank_memory import create_memory

_MODULE = "tokenmill.executor.rank_process"
_END_GRACE = 2.0
"""Seconds that a process may take to end by itself."""


@dataclass(slots=True)
class LocalRank:
    """A process of ours."""

    rank: int
    process: subprocess.Popen[bytes]

    def how_it_ended(self) -> str:
        """`was killed by SIGKILL`, `exited with status 1`, or `runs`."""
        return how_it_ended(self.process) or "runs"


def start_ranks(
    parallel: ParallelConfig,
    node: int,
    address_of: Callable[[int], str | socket.socket],
    *,
    model_path: str = "",
) -> list[LocalRank]:
    """Start the ranks of a node; `address_of` says where a rank finds the executor: `host:port`, or
    the end of a pair of sockets, which is closed here. `model_path` is where the model's files are
    on this machine, if that is not where they are on the executor's.

    Ranks that have parts of the same layers get memory to share, where all of them are here and
    there are native kernels. Raises `OSError`.
    """
    memories: dict[int, int] = {}
    if parallel.tensor_parallel_size > 1 and parallel.groups_share_memory and native.is_available():
        stages = {parallel.place(rank).pp_rank for rank in parallel.ranks_of_node(node)}
        size = parallel.tensor_parallel_size
        memories = {stage: create_memory(size) for stage in stages}
    started: list[LocalRank] = []
    try:
        for rank in parallel.ranks_of_node(node):
            memory = memories.get(parallel.place(rank).pp_rank)
            process = _start(rank, address_of(rank), memory, model_path)
            started.append(LocalRank(rank, process))
    except BaseException:
        end_ranks(started, grace=0.0)
        raise
    finally:
        for fd in memories.values():
            os.close(fd)
    return started


def end_ranks(ranks: Sequence[LocalRank], *, grace: float = _END_GRACE) -> None:
    """Wait for processes to end, and kill those that take more than `grace` seconds."""
    for each in ranks:
        try:
            each.process.wait(grace)
        except subprocess.TimeoutExpired:
            break
    for each in ranks:
        each.process.kill()
        each.process.wait()
        assert each.process.stdin is not None
        each.process.stdin.close()


def _start(
    rank: int, address: str | socket.socket, memory: int | None, model_path: str
) -> subprocess.Popen[bytes]:
    fds = [] if memory is None else [memory]
    end = f"fd:{address.fileno()}" if isinstance(address, socket.socket) else address
    if isinstance(address, socket.socket):
        fds.append(address.fileno())
    in_main = threading.current_thread() is threading.main_thread()
    arguments = [end, str(rank), str(os.getpid()), str(int(in_main)), str(memory or -1), model_path]
    try:
        return start_child(_MODULE, *arguments, pass_fds=fds)
    finally:
        if isinstance(address, socket.socket):
            address.close()
