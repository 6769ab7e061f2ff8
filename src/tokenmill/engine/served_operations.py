"""Sleeping, waking up and replacing weights of a served engine, whatever becomes of its cores."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.operations import (
    SCHEDULING,
    TAGS,
    EngineState,
    Operation,
    Sleep,
    UpdateWeights,
    WakeUp,
    check_operation,
)
from tokenmill.engine.replica import Replica
from tokenmill.engine.replicas import Replicas
from tokenmill.engine.served_requests import ServedRequests
from tokenmill.errors import EngineDeadError

if TYPE_CHECKING:
    from tokenmill.engine.core_client import ProcessClient

logger = logging.getLogger(__name__)


class ServedOperations:
    """What all cores have been asked for; a core that is started again is asked for it, too."""

    def __init__(self, config: EngineConfig, replicas: Replicas, requests: ServedRequests) -> None:
        self._config = config
        self._replicas = replicas
        self._requests = requests
        self.state = EngineState()
        """After the latest operation."""
        self._update: UpdateWeights | None = None
        """Where the weights come from, if not from the model's own files."""
        self._num_updates = 0
        self._under_way: list[Operation] = []
        for replica in replicas:
            replica.on_ready = self._bring_up

    @property
    def is_paused(self) -> bool:
        """Whether no step is made."""
        return SCHEDULING in self.state.asleep

    async def operate(self, operation: Operation) -> EngineState:
        """Have all cores do it; those that are being started do it before they take requests.

        While an engine is asleep it takes requests, which wait. With the mode `abort`, those that
        there are end now. Raises `InvalidRequestError` and `CheckpointError`, and `EngineDeadError`
        while there is no core to ask.
        """
        check_operation(operation, self._config)
        number = self._num_updates + 1
        if isinstance(operation, UpdateWeights):
            # Counted here: a new core does not know of the updates before it.
            number += sum(isinstance(each, UpdateWeights) for each in self._under_way)
            version = operation.version or str(number)
            operation = msgspec.structs.replace(operation, version=version)
        if not isinstance(operation, WakeUp) and operation.mode == "abort":
            self._requests.abort_all("The engine was paused.")
        self._under_way.append(operation)
        try:
            self.state = await self._ask_all(operation)
            if isinstance(operation, UpdateWeights):
                self._update = msgspec.structs.replace(operation, mode="keep")
                self._num_updates = number
        finally:
            self._under_way.remove(operation)
        return self.state

    async def _ask_all(self, operation: Operation) -> EngineState:
        asked = [(each.client, each) for each in self._replicas if each.client is not None]
        clients = [client for client, _ in asked]
        waiting = [asyncio.wrap_future(self._ask(*each, operation)) for each in asked]
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        states = [each for each in answers if isinstance(each, EngineState)]
        for client, answer in zip(clients, answers, strict=True):
            if isinstance(answer, EngineState):
                continue
            if states and isinstance(answer, EngineDeadError):
                continue  # its next core is told
            if states and isinstance(operation, UpdateWeights):
                logger.error("An engine core has not got the weights of the others: %s", answer)
                client.kill()  # its next core has them, or is killed as well
                continue
            self._look()
            raise answer
        if not states:
            raise EngineDeadError("The engine core is being started again; try again soon.")
        return states[0]

    def _look(self) -> None:
        """Some core has failed: parts of it may be asleep now. Without any, nothing is known; the
        next one is brought to where the engine was.
        """
        clients = [each.client for each in self._replicas if each.client is not None]
        if not clients:
            return
        asleep = {tag for client in clients for tag in client.state.asleep}
        in_order = tuple(tag for tag in TAGS if tag in asleep)
        levels = [client.state.level or 0 for client in clients]
        self.state = EngineState(
            in_order, self.state.weight_version, max(levels) if asleep else None
        )

    def _ask(
        self, client: ProcessClient, replica: Replica, operation: Operation
    ) -> Future[EngineState]:
        self._replicas.forget_prefixes(replica)
        answer = client.operate(operation)
        replica.supervisor.after_send()
        return answer

    def _bring_up(self, replica: Replica) -> None:
        """Bring a new core to where the others are, before it gets requests. Without the right
        weights it is of no use.
        """
        client = replica.client
        assert client is not None
        answers = [self._ask(client, replica, each) for each in [*self._orders(), *self._under_way]]
        replica.hold_requests(bool(answers))

        def check(last: Future[EngineState]) -> None:
            errors = [error for each in answers if (error := each.exception()) is not None]
            if not errors:
                replica.hold_requests(False)
            elif not isinstance(errors[0], EngineDeadError):
                logger.error("A new engine core cannot be as the one before: %s", errors[0])
                client.kill()

        for last in answers[-1:]:  # they come in their order
            last.add_done_callback(check)

    def _orders(self) -> list[Operation]:
        orders: list[Operation] = [] if self._update is None else [self._update]
        if self.state.level is not None:
            orders.append(Sleep(self.state.level, "keep"))
            awake = tuple(tag for tag in TAGS if tag not in self.state.asleep)
            orders += [WakeUp(awake)] if awake and self.state.level else []
        return orders
