"""What the prefix cache tells listeners: messages in the form that vLLM's have.

A batch is msgpack: `[time, [event, ...], rank]`, an event `["BlockStored", field, ...]`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True, frozen=True):
    """Something has happened to cached blocks."""


class BlockStored(KVCacheEvent, frozen=True):
    """Full blocks that follow one another can be found from now on."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """Of the block before them; None at the beginning of a sequence."""
    token_ids: list[int]
    """Of all of these blocks."""
    block_size: int
    lora_id: int | None = None
    """Adapters have no numbers here."""
    medium: str | None = None
    lora_name: str | None = None


class BlockRemoved(KVCacheEvent, frozen=True):
    """Blocks are not there any more."""

    block_hashes: list[bytes]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent, frozen=True):
    """Nothing is."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """What one step has brought."""

    ts: float
    """Seconds since 1970."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class EventSink(Protocol):
    """Takes batches of events to whoever listens."""

    def publish(self, batch: EventBatch) -> None:
        """Hand a batch over; does not wait."""
        ...

    def shutdown(self) -> None:
        """Send what waits, and end; may be called twice."""
        ...
