"""Several cores in processes of their own, stepped as one: `LLM(data_parallel_size=...)`."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.encoding import rebuild
from tokenmill.contracts.operations import (
    TAGS,
    EngineState,
    Operation,
    Tensors,
    UpdateWeights,
)
from tokenmill.contracts.request import (
    AdapterInfo,
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
)
from tokenmill.engine import wire
from tokenmill.engine.core_client import DEFAULT_FACTORY, ProcessClient
from tokenmill.engine.placement import placements
from tokenmill.engine.replica_balancer import ReplicaBalancer
from tokenmill.engine.spooled_weights import spooled
from tokenmill.errors import EngineDeadError

_POLL_MS = 200
"""How long to wait for a message before looking whether all cores still live."""


class ReplicasClient:
    """An `EngineCoreClient`: a request goes to the core that has most of its prefix, unless others
    have less to do, and stays there. To be used by one thread, like `ProcessClient`.
    """

    def __init__(
        self, args: EngineArgs, config: EngineConfig, *, factory: str = DEFAULT_FACTORY
    ) -> None:
        """Start all processes. Raises `ConfigError` if there is no place for so many."""
        self._config = config
        self._stats = [SchedulerStats() for _ in range(config.data_parallel_size)]
        self._clients: list[ProcessClient] = []
        self._balancer = ReplicaBalancer(config.data_parallel_size, config.cache)
        self._homes: dict[str, int] = {}
        """Who computes each unfinished request."""
        self._arrived: deque[EngineCoreOutputs] = deque()
        """What came while an answer of another kind was waited for."""
        try:
            for placement in placements(config):
                self._clients.append(
                    ProcessClient(args, config, factory=factory, placement=placement)
                )
        except BaseException:
            self.shutdown()
            raise

    def wait_until_ready(self) -> None:
        """Wait for all cores to be built. Raises what building one raised, or `EngineDeadError`."""
        for client in self._clients:
            client.wait_until_ready()

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        loads = dict.fromkeys(range(len(self._clients)), 0.0)
        for home in self._homes.values():
            loads[home] += 1
        for request in requests:
            rank = self._balancer.assign(request, loads)
            self._clients[rank].add_requests([request])
            self._homes[request.request_id] = rank
            loads[rank] += 1

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            rank = self._homes.pop(request_id, None)
            if rank is not None:
                self._clients[rank].abort_requests([request_id])

    def get_outputs(self) -> EngineCoreOutputs:
        while not self._arrived:
            self._take_in()
        outputs = self._arrived.popleft()
        for output in outputs.outputs:
            if output.finished:
                self._homes.pop(output.request_id, None)
        return outputs

    def reset_prefix_cache(self) -> Future[bool]:
        answers = [client.reset_prefix_cache() for client in self._clients]
        for rank in range(len(self._clients)):
            self._balancer.forget(rank)
        self._wait_for(answers)
        done: Future[bool] = Future()
        done.set_result(all(answer.result() for answer in answers))
        return done

    def load_adapter(self, directory: str) -> Future[AdapterInfo]:
        answers = [client.load_adapter(directory) for client in self._clients]
        self._wait_for(answers)
        for answer in answers:
            if answer.exception() is not None:
                return answer
        return answers[0]

    def stats(self) -> list[SchedulerStats]:
        """Of each core, as of its latest message."""
        return list(self._stats)

    @property
    def state(self) -> EngineState:
        """What is asleep anywhere."""
        states = [client.state for client in self._clients]
        asleep = tuple(tag for tag in TAGS if any(tag in state.asleep for state in states))
        return EngineState(asleep, states[0].weight_version)

    def operate(self, operation: Operation, tensors: Tensors | None = None) -> Future[EngineState]:
        """All do it; weights that come as tensors go to them through files."""
        if tensors is None:
            return self._operate(operation)
        assert isinstance(operation, UpdateWeights)
        with spooled(tensors, self._config.model) as directory:
            return self._operate(msgspec.structs.replace(operation, path=str(directory)))

    def _operate(self, operation: Operation) -> Future[EngineState]:
        for rank in range(len(self._clients)):
            self._balancer.forget(rank)
        answers = [client.operate(operation) for client in self._clients]
        self._wait_for(answers)
        done: Future[EngineState] = Future()
        errors = [each for each in (answer.exception() for answer in answers) if each]
        if errors:
            done.set_exception(errors[0])
        else:
            done.set_result(self.state)
        return done

    def shutdown(self) -> None:
        for client in self._clients:
            client.ask_to_stop()  # all of them, before one is waited for
        for client in self._clients:
            client.shutdown()

    # ---- inside -----------------------------------------------------------------------------

    def _wait_for(self, answers: Sequence[Future[Any]]) -> None:
        while not all(answer.done() for answer in answers):
            self._take_in()

    def _take_in(self) -> None:
        """Take the messages that are there, or wait for some. Raises what a core says of a request,
        and `EngineDeadError` if one has ended.
        """
        found = False
        for rank, client in enumerate(self._clients):
            client.page.beat_front_end()
            while (message := client.receive()) is not None:
                found = True
                match message:
                    case wire.StepOutputs(outputs):
                        self._stats[rank] = outputs.stats or self._stats[rank]
                        self._arrived.append(outputs)
                    case wire.Refusal(request_id, error):
                        self._homes.pop(request_id, None)
                        raise rebuild(error)
            if not client.is_alive:
                raise EngineDeadError(f"An engine core {client.how_it_ended()}.")
        if not found:
            self._wait()

    def _wait(self) -> None:
        """Until one of the cores has said something, or it is time to look at them."""
        poll = select.poll()
        for client in self._clients:
            poll.register(client.fileno(), select.POLLIN)
        poll.poll(_POLL_MS)
