"""What scheduler and engine core ask of KV transfers, where there are none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenmill.core.kv.block_pool import BlockPool, KVCacheBlock
from tokenmill.core.request import Request


class NoTransfers:
    """All KV is in the pool. `KVTransfers` says what is asked."""

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
