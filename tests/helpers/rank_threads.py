"""An engine whose ranks are threads of this process, not processes: everything between the engine
and the layers is the real thing, and nothing has to be started.

Recordings take their memory from a place that threads would share, so these engines run eagerly,
with one thread each; `tests/engine/test_ranks.py` has processes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tokenmill import LLM
from tokenmill.config.parallel import ParallelConfig, RankPlace
from tokenmill.contracts.encoding import describe
from tokenmill.engine.build import build_rank
from tokenmill.executor import messages, multiproc
from tokenmill.executor.launch import LocalRank
from tokenmill.executor.rank_process import Channel, RankLoop
from tokenmill.kernels.rank_memory import create_memory
from tokenmill.parallel.group import SOLO, SharedMemoryGroup, TensorGroup
from tokenmill.worker.ranks import GroupRanks, StageRanks
from tokenmill.worker.worker import Worker

_PATIENCE = 60.0


class QueueLinks:
    """`StageLinks` of a rank in a thread; `queues` are by the rank that reads."""

    def __init__(self, place: RankPlace, queues: dict[int, queue.Queue[torch.Tensor]]) -> None:
        self._own, self._next = queues[place.rank], queues[place.rank + place.tp_size]

    def receive(self, num_tokens: int, hidden_size: int) -> torch.Tensor:
        stream = self._own.get(timeout=_PATIENCE)
        assert stream.shape == (num_tokens, hidden_size)
        return stream

    def send(self, stream: torch.Tensor) -> None:
        self._next.put(stream.clone())


class RankThreads:
    """Starts ranks, and has their workers to be looked at."""

    def __init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        """By rank."""
        self._threads: list[threading.Thread] = []
        self._processes: list[LocalRank] = []
        self._fds: list[int] = []

    def start(
        self, parallel: ParallelConfig, node: int, address_of: Callable[[int], socket.socket]
    ) -> list[LocalRank]:
        """As `start_ranks`; a process that does nothing stands for each thread."""
        queues: dict[int, queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
        memories = []
        if parallel.tensor_parallel_size > 1:
            stages = range(parallel.pipeline_parallel_size)
            memories = [create_memory(parallel.tensor_parallel_size) for _ in stages]
        self._fds += memories
        ranks = []
        for rank in parallel.ranks_of_node(node):
            place = parallel.place(rank)
            memory = memories[place.pp_rank] if memories else None
            links = QueueLinks(place, queues)
            thread = threading.Thread(
                target=self._be, args=(address_of(rank), place, memory, links), daemon=True
            )
            self._threads.append(thread)
            self._threads[-1].start()
            ranks.append(LocalRank(rank, subprocess.Popen(["true"], stdin=subprocess.PIPE)))
        return ranks

    def join(self) -> None:
        """Wait for the threads of an executor that has ended."""
        for thread in self._threads:
            thread.join(_PATIENCE)
            assert not thread.is_alive(), "a rank does not end"
        for fd in self._fds:
            os.close(fd)

    def _be(
        self, stream: socket.socket, place: RankPlace, memory: int | None, links: QueueLinks
    ) -> None:
        with contextlib.suppress(EOFError, OSError), stream:
            self._serve(Channel(stream), place, memory, links)

    def _serve(
        self, channel: Channel, place: RankPlace, memory: int | None, links: QueueLinks
    ) -> None:
        setup = channel.receive()
        if not isinstance(setup, messages.RankSetup):  # another one could not be built
            return
        if setup.store_address == "":
            channel.send(messages.StoreAddress("threads:0"))
        group: TensorGroup = SOLO
        if memory is not None:
            group = SharedMemoryGroup(memory, place.tp_rank, place.tp_size)
        ranks = GroupRanks(place, group)
        if place.pp_size > 1:
            ranks = StageRanks(place, group, links)
        try:
            worker = build_rank(setup.args, setup.config, lambda done, total: None, ranks)
            self.workers[place.rank] = worker
            channel.send(messages.Built.of(worker.kv_cache_config, "in threads"))
            is_output = place.rank == setup.config.parallel.output_rank
            RankLoop(worker, channel, ranks, is_output).run()
        except Exception as error:  # noqa: BLE001 - told as a process would
            is_consequence = group.is_broken
            ranks.break_up()
            channel.send(messages.Failed(describe(error), is_consequence))


@contextlib.contextmanager
def llm_in_threads(path: Path | str, **settings: Any) -> Iterator[tuple[LLM, RankThreads]]:
    """An `LLM` with these settings, one of which asks for several ranks."""
    threads = RankThreads()
    executor = partial(multiproc.MultiprocExecutor, start=threads.start)
    try:
        with mock.patch.object(multiproc, "MultiprocExecutor", executor):
            llm = LLM(str(path), device="cpu", enforce_eager=True, num_threads=1, **settings)
        with llm:
            yield llm, threads
    finally:
        threads.join()
