"""What scheduler and engine core ask of KV transfers, and the case that there are none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from tokenmill.core.kv.block_pool import BlockPool, KVCacheBlock
from tokenmill.core.request import Request


class Transfers(Protocol):
    """It is a `ReadinessRule` as well."""

    @property
    def is_busy(self) -> bool:
        """Whether blocks are being loaded or saved, or something else has to be settled."""
        ...

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks wait for another engine: it must be looked at now and then."""
        ...

    def begin_pass(self, running: Mapping[str, Request]) -> None:
        """Waiting requests will be asked for."""
        ...

    def wait_reason(self, request: Request) -> str | None:
        """Why a request may not start now; None if it may."""
        ...

    def request_finished(self, request: Request) -> None:
        """A request has ended, in whatever state, and holds no blocks."""
        ...

    def step_submitted(self) -> None:
        """One more step is in flight."""
        ...

    def step_settled(self) -> None:
        """The oldest step in flight is done with its blocks."""
        ...

    def poll(self) -> None:
        """Settle what has finished, and begin what may begin."""
        ...

    def wait(self) -> None:
        """While a request waits for nothing else, wait a moment for a job to finish."""
        ...

    def take_failures(self) -> list[tuple[str, str]]:
        """Requests that are to end since their KV could not be loaded, and why."""
        ...

    def tables(self, pool: BlockPool) -> Iterable[Sequence[KVCacheBlock]]:
        """Blocks of a pool that jobs hold."""
        ...

    def flush(self, seconds: float) -> None:
        """Let what is being saved be saved, and begin nothing."""
        ...

    def counts(self) -> dict[str, Any]:
        """Fields of `SchedulerStats`."""
        ...

    def shutdown(self) -> None:
        """Save what is to be saved, and end; may be called twice."""
        ...


class NoTransfers:
    """All KV is in the pool."""

    is_busy = False
    holds_blocks = False

    def begin_pass(self, running: Mapping[str, Request]) -> None:
        """Nobody waits."""

    def wait_reason(self, request: Request) -> str | None:
        return None

    def request_finished(self, request: Request) -> None:
        """Nothing was kept of it."""

    def step_submitted(self) -> None:
        """Nothing waits for it."""

    def step_settled(self) -> None:
        """Nothing waits for it."""

    def poll(self) -> None:
        """Nothing is under way."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    def take_failures(self) -> list[tuple[str, str]]:
        return []

    def tables(self, pool: BlockPool) -> Iterable[Sequence[KVCacheBlock]]:
        return ()

    def flush(self, seconds: float) -> None:
        """Nothing is to be saved."""

    def counts(self) -> dict[str, Any]:
        return {}

    def shutdown(self) -> None:
        """Nothing runs."""
