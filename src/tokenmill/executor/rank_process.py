"""The process of one rank: `python -m tokenmill.executor.rank_process`.

Started by `launch.py` only. It builds the worker that it is told to build and then does what the
executor says, until either ends.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tokenmill import __version__
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.parallel import RankPlace
from tokenmill.contracts.encoding import LogSender, describe
from tokenmill.executor import messages
from tokenmill.executor.lifeline import begin_child, leave, start_lifeline
from tokenmill.kernels.native import active_isa
from tokenmill.parallel.join import join_group
from tokenmill.worker.ranks import GroupRanks, StageRanks
from tokenmill.worker.stage import StageWorker
from tokenmill.worker.worker import Worker

logger = logging.getLogger(__name__)

_BUILD = "tokenmill.engine.build"
_PROGRESS_INTERVAL = 0.05
"""Seconds between two messages on how far the rank is loaded."""
_CONNECT_INTERVAL = 0.2
"""Between two attempts to reach an executor on another machine."""


class Channel:
    """The stream to the executor; threads may send at the same time."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, message: messages.FromRank) -> None:
        data = messages.frame(message)
        with self._lock:
            self._stream.sendall(data)

    def receive(self) -> messages.ToRank:
        """The next message. Raises `EOFError` if the executor has gone."""
        return messages.receive_to_rank(self._stream)


class RankLoop:
    """Messages in, steps, results out."""

    def __init__(self, worker: Worker, channel: Channel, ranks: GroupRanks, output: bool) -> None:
        self._worker = worker
        self._channel = channel
        self._group = ranks.group
        self._is_output = output
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="tokenmill-adapters")

    def run(self) -> None:
        """Work until the executor says stop, or has gone."""
        while True:
            try:
                message = self._channel.receive()
            except EOFError:
                return
            match message:
                case messages.Execute(plan, sampled):
                    for each in sampled:
                        assert isinstance(self._worker, StageWorker)
                        self._worker.learn(each)
                    self._worker.execute_model(plan)
                case messages.Sample(grammar_output):
                    output = self._worker.sample_tokens(grammar_output).result()
                    if self._group.is_broken:
                        raise RuntimeError("the ranks are not in step")
                    if self._is_output:
                        self._channel.send(messages.StepResult(output))
                case messages.LoadAdapter(number, directory):
                    self._reading.submit(self._load_adapter, number, directory)
                case messages.Stop():
                    return
                case _:
                    raise AssertionError(f"{type(message).__name__} comes at another time")

    def _load_adapter(self, number: int, directory: str) -> None:
        try:
            info, error = self._worker.load_adapter(directory), None
        except Exception as raised:  # noqa: BLE001 - the process boundary: it is raised there
            info, error = None, describe(raised)
        self._channel.send(messages.AdapterLoaded(number, info, error))


def build(setup: messages.RankSetup, channel: Channel, ranks: GroupRanks) -> Worker:
    """Make the worker, as the engine's own build does; that is above this package."""
    build_rank: Callable[..., Worker] = importlib.import_module(_BUILD).build_rank
    last_sent = 0.0

    def on_progress(done: int, total: int) -> None:
        nonlocal last_sent
        now = time.monotonic()
        if ranks.place.rank == 0 and (done >= total or now - last_sent > _PROGRESS_INTERVAL):
            last_sent = now
            channel.send(messages.LoadProgress(done, total))

    return build_rank(setup.args, setup.config, on_progress, ranks)


def serve(channel: Channel, memory_fd: int, model_path: str) -> int:
    """Build the rank and run its loop; the process's exit status."""
    setup = channel.receive()
    assert isinstance(setup, messages.RankSetup), "the setup comes first"
    place = setup.config.parallel.place(setup.rank)
    num_processors = _take_processors(place)
    setup.config = _on_this_machine(setup.config, num_processors, model_path)
    package_logger = logging.getLogger("tokenmill")
    package_logger.setLevel(setup.log_level)
    sender = LogSender(channel.send, f"rank {setup.rank}: " if setup.rank else "")
    if setup.rank:  # all ranks choose alike, and the first one tells
        sender.setLevel(logging.WARNING)
    package_logger.addHandler(sender)
    ranks = None
    try:
        ranks = _join_ranks(setup, place, memory_fd, channel)
        worker = build(setup, channel, ranks)
        arithmetic = f"tokenmill {__version__} on {active_isa()}"
        channel.send(messages.Built.of(worker.kv_cache_config, arithmetic))
        is_output = setup.rank == setup.config.parallel.output_rank
        RankLoop(worker, channel, ranks, is_output).run()
    except Exception as error:  # the process boundary: the executor raises it again
        is_consequence = ranks is not None and ranks.group.is_broken
        if ranks is not None:
            ranks.break_up()
        logger.debug("Rank %d failed.", setup.rank, exc_info=True)
        channel.send(messages.Failed(describe(error), is_consequence))
        return 1
    return 0


def _on_this_machine(config: EngineConfig, num_processors: int, model_path: str) -> EngineConfig:
    """Settings that may be others than on the executor's machine."""
    if model_path:
        config = replace(config, model=replace(config.model, path=model_path))
    return replace(config, num_threads=min(config.num_threads, num_processors))


def _join_ranks(
    setup: messages.RankSetup, place: RankPlace, memory_fd: int, channel: Channel
) -> GroupRanks:
    parallel = setup.config.parallel
    group = join_group(
        parallel,
        place,
        memory_fd=None if memory_fd < 0 else memory_fd,
        store_address=setup.store_address,
        tell_address=lambda address: channel.send(messages.StoreAddress(address)),
    )
    if parallel.pipeline_parallel_size == 1:
        return GroupRanks(place, group)
    from tokenmill.parallel.links import ProcessGroupLinks

    return StageRanks(place, group, ProcessGroupLinks(place))


def _take_processors(place: RankPlace) -> int:
    """Keep to this rank's share of the processors that the process may use, if there are enough.

    How many they are.
    """
    if not hasattr(os, "sched_setaffinity"):
        return max((os.cpu_count() or 1) // place.num_local, 1)
    processors = sorted(os.sched_getaffinity(0))
    count = len(processors) // place.num_local
    if count:
        first = place.local_rank * count
        os.sched_setaffinity(0, processors[first : first + count])
    return max(count, 1)


def _connect(address: str, rank: int) -> socket.socket:
    """The stream to the executor at `fd:number` or `host:port`; that one may come later than we."""
    kind, _, rest = address.partition(":")
    if kind == "fd":
        os.set_inheritable(int(rest), False)
        return socket.socket(fileno=int(rest))
    host, _, port = address.rpartition(":")
    while True:
        try:
            stream = socket.create_connection((host, int(port)))
            break
        except OSError:
            time.sleep(_CONNECT_INTERVAL)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.sendall(messages.frame(messages.Hello(rank)))
    return stream


def main(
    address: str,
    *,
    rank: int,
    parent_pid: int,
    dies_with_thread: bool,
    memory_fd: int,
    model_path: str,
) -> None:
    """Be the rank of the executor at `address`, until either ends."""
    begin_child()
    if memory_fd >= 0:
        os.set_inheritable(memory_fd, False)
    start_lifeline(parent_pid, dies_with_thread=dies_with_thread)
    try:
        status = serve(Channel(_connect(address, rank)), memory_fd, model_path)
    except (EOFError, ConnectionError):  # the executor has gone
        status = 1
    leave(status)


if __name__ == "__main__":
    main(
        sys.argv[1],
        rank=int(sys.argv[2]),
        parent_pid=int(sys.argv[3]),
        dies_with_thread=sys.argv[4] == "1",
        memory_fd=int(sys.argv[5]),
        model_path=sys.argv[6],
    )
