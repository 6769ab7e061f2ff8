"""Sleeping, waking up and replacing weights of a served engine, whatever becomes of its cores."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future

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
        if not isinstance(operation, WakeUp) and operation.mode == "abort":
            self._requests.abort_all("The engine was paused.")
        self._under_way.append(operation)
        try:
            self.state = await self._ask_all(operation)
            if isinstance(operation, UpdateWeights):
                self._update = UpdateWeights(operation.path, self.state.weight_version, "keep")
        finally:
            self._under_way.remove(operation)
        return self.state

    async def _ask_all(self, operation: Operation) -> EngineState:
        asked = [(each, self._ask(each, operation)) for each in self._replicas]
        waiting = [asyncio.wrap_future(each) for _, each in asked if each is not None]
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        states = [each for each in answers if isinstance(each, EngineState)]
        for answer in answers:
            if isinstance(answer, BaseException) and not (
                states and isinstance(answer, EngineDeadError)  # its next core is told
            ):
                self._look()
                raise answer
        if not states:
            raise EngineDeadError("The engine core is being started again; try again soon.")
        return states[0]

    def _look(self) -> None:
        """Some core has failed: parts of it may be asleep now."""
        clients = [each.client for each in self._replicas if each.client is not None]
        asleep = {tag for client in clients for tag in client.state.asleep}
        in_order = tuple(tag for tag in TAGS if tag in asleep)
        levels = [client.state.level or 0 for client in clients]
        self.state = EngineState(
            in_order, self.state.weight_version, max(levels, default=0) if asleep else None
        )

    def _ask(self, replica: Replica, operation: Operation) -> Future[EngineState] | None:
        if replica.client is None:
            return None
        self._replicas.forget_prefixes(replica)
        answer = replica.client.operate(operation)
        replica.supervisor.after_send()
        return answer

    def _bring_up(self, replica: Replica) -> None:
        """Bring a new core to where the others are. Without the right weights it is of no use."""
        for operation in [*self._orders(), *self._under_way]:
            answer = self._ask(replica, operation)
            assert answer is not None
            answer.add_done_callback(lambda done: self._check_brought_up(replica, done))

    def _orders(self) -> list[Operation]:
        orders: list[Operation] = [] if self._update is None else [self._update]
        if self.state.level is not None:
            orders.append(Sleep(self.state.level, "keep"))
            awake = tuple(tag for tag in TAGS if tag not in self.state.asleep)
            orders += [WakeUp(awake)] if awake and self.state.level else []
        return orders

    @staticmethod
    def _check_brought_up(replica: Replica, done: Future[EngineState]) -> None:
        error = None if done.cancelled() else done.exception()
        client = replica.client
        if error is not None and not isinstance(error, EngineDeadError) and client is not None:
            logger.error("A new engine core cannot be as the one before: %s", error)
            client.kill()
