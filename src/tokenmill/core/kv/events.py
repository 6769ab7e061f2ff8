"""Which blocks have come into the prefix cache and gone out of it, for listeners.

Where layers form several groups, one of them speaks for all: the first that keeps every token, or
else the first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tokenmill.contracts.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventSink,
)
from tokenmill.core.kv.block_pool import BlockKey, group_index_of, hash_of
from tokenmill.core.kv.groups import FullAttentionGroup
from tokenmill.core.request import Request


class NoKVEvents:
    """Nobody listens."""

    def flush(self) -> None:
        """There is nothing to tell."""

    def shutdown(self) -> None:
        """Nothing runs."""


class KVEvents:
    """Collects what happens to the blocks of one group, and tells it once a step."""

    def __init__(
        self, groups: Sequence[FullAttentionGroup], block_size: int, sink: EventSink
    ) -> None:
        self._group = next((group for group in groups if group.keeps_all), groups[0])
        self._block_size = block_size
        self._sink = sink
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self._removed: list[bytes] = []
        self._group.on_store = self._stored
        self._group.pool.on_forget = self._forgotten
        self._group.pool.on_clear = self._cleared

    def flush(self) -> None:
        """Tell what has happened since the last call, if anything has."""
        self._close_removed()
        if self._events:
            events, self._events = self._events, []
            self._sink.publish(EventBatch(time.time(), events))

    def shutdown(self) -> None:
        """Tell what is left, and end; may be called twice."""
        self.flush()
        self._sink.shutdown()

    def _stored(self, request: Request, start: int, end: int) -> None:
        """Blocks `start` to `end` of a request's sequence can be found now."""
        self._close_removed()
        size, hashes, adapter = self._block_size, request.block_hashes, request.data.adapter
        self._events.append(
            BlockStored(
                block_hashes=hashes[start:end],
                parent_block_hash=hashes[start - 1] if start else None,
                token_ids=request.all_token_ids[start * size : end * size],
                block_size=size,
                lora_name=None if adapter is None else adapter.name,
            )
        )

    def _forgotten(self, key: BlockKey) -> None:
        """No block with this content can be found any more."""
        if group_index_of(key) == self._group.index:
            self._removed.append(hash_of(key))

    def _cleared(self) -> None:
        self._removed.clear()
        self._events.append(AllBlocksCleared())

    def _close_removed(self) -> None:
        """Events are told in the order in which they happened."""
        if self._removed:
            removed, self._removed = self._removed, []
            self._events.append(BlockRemoved(removed))
