"""Sleeping, waking up and replacing weights, between the steps of a core.

    asked -> (mode wait: requests that have begun finish) -> steps in flight settle -> done

Operations are done one after another. While one waits, requests that have not begun do not begin.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future

from tokenmill.contracts.operations import (
    KV_CACHE,
    SCHEDULING,
    TAGS,
    WEIGHTS,
    EngineState,
    FixedMemory,
    ModelMemory,
    Operation,
    Sleep,
    Tensors,
    UpdateWeights,
    WakeUp,
)
from tokenmill.core.scheduler import Scheduler
from tokenmill.errors import InvalidRequestError

logger = logging.getLogger(__name__)

_MEMORY = frozenset((KV_CACHE, WEIGHTS))


class CoreOperations:
    """The operations of one core; called by its thread only."""

    def __init__(self, scheduler: Scheduler, memory: ModelMemory | None = None) -> None:
        self._scheduler = scheduler
        self._memory = memory or FixedMemory()
        self.state = EngineState()
        self.holds_steps = False
        """Whether no step may begin."""
        self._num_updates = 0
        self._asked: deque[tuple[Operation, Tensors | None, Future[EngineState]]] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether an operation is to be done."""
        return bool(self._asked)

    def begin(self, operation: Operation, tensors: Tensors | None = None) -> Future[EngineState]:
        """Have an operation done; it is over when the result, the state behind it, is there.

        `tensors` are the weights of an `UpdateWeights`, where they are not at its path. The result
        raises `InvalidRequestError` for what cannot be, and `CheckpointError`.
        """
        done: Future[EngineState] = Future()
        self._asked.append((operation, tensors, done))
        self._update()
        return done

    def advance(self) -> None:
        """Do what may be done; to be called while no step is in flight."""
        while self._asked and not self._waits_for_requests():
            operation, tensors, done = self._asked.popleft()
            try:
                self._apply(operation, tensors)
            except Exception as error:  # noqa: BLE001 - raised again by whoever has asked
                done.set_exception(error)
            else:
                done.set_result(self.state)
        self._update()

    def _update(self) -> None:
        self._scheduler.readiness.is_closed = bool(self._asked)
        is_due = bool(self._asked) and not self._waits_for_requests()
        self.holds_steps = is_due or SCHEDULING in self.state.asleep

    def _waits_for_requests(self) -> bool:
        """Whether the next operation waits for requests; those of a paused engine never end."""
        operation = self._asked[0][0]
        if isinstance(operation, WakeUp) or operation.mode != "wait":
            return False
        if SCHEDULING in self.state.asleep:
            return False
        requests = self._scheduler.requests.values()
        return any(request.first_scheduled_time is not None for request in requests)

    def _apply(self, operation: Operation, tensors: Tensors | None) -> None:
        match operation:
            case Sleep():
                self._sleep(operation)
            case WakeUp(tags):
                self._wake_up(frozenset(tags))
            case UpdateWeights():
                self._update_weights(operation, tensors)

    def _sleep(self, operation: Sleep) -> None:
        asleep = {*self.state.asleep, SCHEDULING}
        if operation.level or operation.clear_cache:
            self._drop_caches()
        if operation.level:
            num_bytes = self._memory.sleep(operation.level)
            asleep |= _MEMORY
            logger.info("asleep: %.1f MiB given back", num_bytes / (1 << 20))
        self._set(asleep, max(operation.level, self.state.level or 0))

    def _wake_up(self, tags: frozenset[str]) -> None:
        asleep = set(self.state.asleep)
        missing = asleep & _MEMORY - tags
        if SCHEDULING in tags and missing:
            names = ", ".join(each for each in TAGS if each in missing)
            raise InvalidRequestError(
                f"tags: no step (scheduling) can be made without {names}; wake that up as well.",
                parameter="tags",
            )
        if WEIGHTS in tags & asleep:
            self._memory.wake_up()
            if not self._memory.has_weights:
                raise InvalidRequestError(
                    "the model has no whole set of weights to wake up with (they came as tensors"
                    " and were dropped, or an update has failed): call update_weights.",
                    parameter="tags",
                )
        if tags:
            self._set({SCHEDULING, *missing} if missing else set())

    def _update_weights(self, operation: UpdateWeights, tensors: Tensors | None) -> None:
        self._drop_caches()
        asleep = set(self.state.asleep)
        try:
            self._memory.update_weights(operation.path, tensors)
        except BaseException:
            if not self._memory.has_weights:
                logger.error("Some weights are replaced, others are not: the engine is asleep.")
                self._set(asleep | {WEIGHTS, SCHEDULING}, 2)
            raise
        if WEIGHTS in asleep:
            asleep.remove(WEIGHTS)
            if KV_CACHE not in asleep:
                asleep.clear()
        self._num_updates += 1
        self._set(asleep, version=operation.version or str(self._num_updates))
        logger.info("weights %s of %s", self.state.weight_version, operation.path or "tensors")

    def _drop_caches(self) -> None:
        """Forget all that was computed; requests that have begun compute it again."""
        if not self._scheduler.reset_prefix_cache(reset_running_requests=True):
            raise InvalidRequestError(
                "blocks of the KV cache are on their way to or from another engine or a file; try"
                " again soon."
            )
        self._scheduler.encoder.cache.clear()

    def _set(self, asleep: set[str], level: int | None = None, version: str | None = None) -> None:
        """The new state; level and version stay where they are None."""
        in_order = tuple(each for each in TAGS if each in asleep)
        level = self.state.level if level is None else level
        version = self.state.weight_version if version is None else version
        self.state = EngineState(in_order, version, level if asleep else None)
