"""Ranks on machines of a Ray cluster: an actor of each machine starts that machine's ranks.

    engine core ----Ray----> actor 0: machine a      actor 1: machine b
         |                      |                       |
         '------TCP------->  rank 0, rank 1          rank 2, rank 3

Ray chooses the machines and starts the processes. All else goes the way that it goes without: ranks
come to the engine, and a rank that dies is a stream that ends. Ranks of a machine are processes of
one actor, and no actors themselves, so that they can share memory.

Nothing of Ray is imported before somebody asks for it.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tokenmill.checkpoint.names import resolve_model
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.parallel import ParallelConfig
from tokenmill.errors import ConfigError, EngineDeadError, TokenmillError
from tokenmill.executor.launch import end_ranks, start_ranks
from tokenmill.executor.remote import accept_at, open_listener

_SETTING = "distributed_executor_backend='ray'"
_PLACE_TIMEOUT = 60.0
"""Seconds for processors that others use to become free, and for an actor to start."""
_END_PATIENCE = 2.0
"""Seconds for the ranks to end by themselves."""
_NEIGHBOUR_PATIENCE = 0.5
"""Seconds for ranks to end after one of their machine has, before it is told how."""
_LOOK_INTERVAL = 0.1
"""Seconds between two looks of an actor at its ranks."""
_LOOPBACK = "127.0.0.1"


class RayRanks:
    """All ranks of a model, on as many machines of the cluster as `num_nodes` says.

    A `RankPlaces`, to be used by one thread.
    """

    def __init__(self, args: EngineArgs, config: EngineConfig) -> None:
        """Take the machines, and start the ranks, which come to `accept`.

        Raises `ConfigError` without Ray, without a cluster or with too few processors in it, and
        what an actor cannot do.
        """
        self._ray = _imported()
        self._parallel = config.parallel
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        """Of each machine, what comes when one of its ranks has ended."""
        self._listener: socket.socket | None = None
        self._is_ours = not self._ray.is_initialized()
        try:
            if self._is_ours:
                _connect(self._ray)
            self._place(self._parallel.num_local * config.num_threads, config)
            host, port = self._listen(args)
            # Ranks meet where the first one is, which need not be where the engine is.
            first = self._get(self._actors[0].address.remote())
            self.parallel = replace(self._parallel, master_addr=first)
            self._runs = [
                actor.run.remote(self.parallel, node, f"{host}:{port}", args.model, args.revision)
                for node, actor in enumerate(self._actors)
            ]
        except BaseException:
            self.end(grace=0.0)
            raise

    def accept(self, check_others: Callable[[], None]) -> Iterator[tuple[int, socket.socket]]:
        """Each rank with its stream, as they come; waits for all of them.

        `check_others` is called now and then, and may raise. Raises `EngineDeadError` if one ends
        before it comes, and what an actor cannot do.
        """
        assert self._listener is not None

        def check() -> None:
            check_others()
            for node in range(len(self._runs)):
                endings = self._endings(node, timeout=0.0)
                for rank, ending in (endings or {}).items():
                    raise EngineDeadError(f"Rank {rank} {ending}.")

        with self._listener as listener:
            ranks = range(self._parallel.world_size)
            yield from accept_at(listener, ranks, check, "their machines may be fetching the model")

    def how_it_ended(self, rank: int) -> str:
        """Of a rank whose stream has ended: `was killed by SIGKILL`, `exited with status 1`."""
        try:
            endings = self._endings(rank // self._parallel.num_local, timeout=_END_PATIENCE)
        except TokenmillError as error:
            return f"has gone: {error}"
        return (endings or {}).get(rank, "has closed its stream")

    def end(self, *, grace: float = _END_PATIENCE) -> None:
        """Give the machines back; ranks that take more than `grace` seconds to end are killed."""
        if self._listener is not None:
            self._listener.close()
        if not self._ray.is_initialized():
            return
        if grace and self._runs:
            self._ray.wait(self._runs, num_returns=len(self._runs), timeout=grace)
        for actor in self._actors:
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._actors, self._runs, self._group = [], [], None
        if self._is_ours:
            self._ray.shutdown()

    def _place(self, num_cpus: int, config: EngineConfig) -> None:
        """Take `num_cpus` processors of each machine, and have an actor on it."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        num_nodes = self._parallel.num_nodes
        sizes = [
            int(each["Resources"].get("CPU", 0)) for each in self._ray.nodes() if each["Alive"]
        ]
        needed = (
            f"{_SETTING} needs {num_cpus} processors on each of nnodes={num_nodes} machines, for"
            f" {self._parallel.num_local} ranks of num_threads={config.num_threads} there"
        )
        remedy = "Lower num_threads, or take fewer or other machines."
        if sum(size >= num_cpus for size in sizes) < num_nodes:
            have = ", ".join(map(str, sorted(sizes, reverse=True)))
            raise ConfigError(f"{needed}, but those of the cluster have {have}. {remedy}")
        bundles = [{"CPU": num_cpus}] * num_nodes
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        if not self._group.wait(timeout_seconds=_PLACE_TIMEOUT):
            raise ConfigError(
                f"{needed}, which others still used after {_PLACE_TIMEOUT:.0f} seconds. {remedy}"
            )
        make = self._ray.remote(RayMachine)
        for index in range(num_nodes):
            place = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
            self._actors.append(make.options(num_cpus=num_cpus, scheduling_strategy=place).remote())

    def _listen(self, args: EngineArgs) -> tuple[str, int]:
        """Wait for ranks at `master_addr`, or where Ray reaches this machine; at any free port."""
        host = args.master_addr
        if host == _LOOPBACK:
            host = self._ray.util.get_node_ip_address()
        self._listener = open_listener(host, 0)
        return host, self._listener.getsockname()[1]

    def _endings(self, node: int, timeout: float) -> dict[int, str] | None:
        """How ranks of a machine have ended, if one has. Raises what its actor did."""
        run = self._runs[node]
        done, _ = self._ray.wait([run], timeout=timeout)
        return self._get(run) if done else None

    def _get(self, answer: Any) -> Any:
        """An actor's answer; what it raised is raised here."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(answer, timeout=_PLACE_TIMEOUT)
        except errors.RayTaskError as error:
            if isinstance(error.cause, TokenmillError):
                raise error.cause from error
            raise EngineDeadError(f"a Ray actor cannot run ranks: {error.cause!r}") from error
        except errors.RayError as error:
            what = str(error).partition("\n")[0]
            raise EngineDeadError(f"a Ray actor cannot run ranks: {what}") from error


class RayMachine:
    """An actor: the ranks of a machine, for one engine."""

    def address(self) -> str:
        """Of this machine, as the others reach it."""
        import ray

        return str(ray.util.get_node_ip_address())

    def run(
        self, parallel: ParallelConfig, node: int, address: str, model: str, revision: str | None
    ) -> dict[int, str]:
        """Start the ranks of machine `node`, which come to `address`, and wait until one ends; then
        end the others. How those ended that ended by themselves.
        """
        path = str(resolve_model(model, revision))
        ranks = start_ranks(parallel, node, lambda rank: address, model_path=path)
        try:
            while all(each.process.poll() is None for each in ranks):
                time.sleep(_LOOK_INTERVAL)
            return {
                each.rank: each.how_it_ended() for each in ranks if each.process.poll() is not None
            }
        finally:
            end_ranks(ranks, grace=_NEIGHBOUR_PATIENCE)


def _imported() -> Any:
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError as error:
        raise ConfigError(
            f'{_SETTING} needs `pip install "tokenmill[ray]"` on all machines of the cluster.'
        ) from error
    return ray


def _connect(ray: Any) -> None:
    """Be a driver of the cluster that RAY_ADDRESS names, or that this machine belongs to."""
    try:
        with _signals_kept():
            ray.init(address="auto", log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{_SETTING}: no Ray cluster can be reached ({error}). Start one with `ray start"
            f" --head`, or name one by RAY_ADDRESS."
        ) from error


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself, which is ours."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
