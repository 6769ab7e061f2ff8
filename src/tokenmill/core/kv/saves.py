"""Which cached blocks are kept outside the pool: those that nobody holds any more.

While a block is copied it is held, so that it is not handed out. Blocks that are needed before
their turn comes are not saved: the pool's own use of its blocks goes first.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tokenmill.contracts.kv_transfer import BlockCopy, Transferred
from tokenmill.contracts.seams import KVTransfer
from tokenmill.core.kv.block_pool import BlockKey, BlockPool, KVCacheBlock, group_index_of

logger = logging.getLogger(__name__)

BLOCKS_PER_JOB = 16
"""So many are held until all of them are kept."""
SHARE_HELD = 4
"""At most one in so many blocks of a pool is held for being saved."""
_WARNING_SECONDS = 10.0
"""Between two lines about blocks that could not be saved."""


@dataclass(slots=True)
class HeldBlocks:
    """Blocks that something is done with; each counts as held once."""

    held: list[tuple[BlockPool, KVCacheBlock]]

    def free(self) -> None:
        """Release them, from the last of a sequence to the first."""
        for pool, block in reversed(self.held):
            pool.free_blocks([block])


@dataclass(slots=True)
class _Candidate:
    pool: BlockPool
    block: KVCacheBlock
    key: BlockKey
    """Of its content when it was released."""

    @property
    def is_current(self) -> bool:
        """Whether the block still has that content, and the pool has the block."""
        is_there = self.pool.blocks[self.block.block_id] is self.block
        return is_there and self.block.key == self.key


@dataclass(slots=True)
class _Save(HeldBlocks):
    """Blocks on their way out."""

    keys: list[BlockKey]


class Saves:
    """Jobs that copy blocks of these pools to a `KVTransfer`, if it keeps any."""

    def __init__(
        self, pools: Sequence[BlockPool], transfer: KVTransfer, new_id: Callable[[], int]
    ) -> None:
        self._transfer = transfer
        self._new_id = new_id
        self._candidates: deque[_Candidate] = deque(maxlen=sum(pool.num_blocks for pool in pools))
        self._saving: set[BlockKey] = set()
        self._is_settling = False
        self._next_warning = 0.0
        self.jobs: dict[int, _Save] = {}
        if transfer.keeps_blocks:
            for pool in pools:
                pool.on_release = partial(self._released, pool)

    @property
    def is_busy(self) -> bool:
        """Whether blocks are being saved, or may be."""
        return bool(self.jobs or self._candidates)

    def begin(self) -> None:
        """Begin with the candidates that came last, the first of their sequence before the others,
        as many as the pool can do without for a moment.
        """
        while self._candidates and (batch := self._next_batch()):
            job_id = self._new_id()
            held = [(each.pool, each.block) for each in batch]
            self.jobs[job_id] = _Save(held, [each.key for each in batch])
            copies = [BlockCopy(c.key, group_index_of(c.key), c.block.block_id) for c in batch]
            self._transfer.save(job_id, copies)

    def settle(self, done: Transferred) -> None:
        """A job has finished. What it could not save is not tried again at once."""
        if done.error is not None:
            self._warn(done.error)
        job = self.jobs.pop(done.job_id)
        self._saving.difference_update(job.keys)
        self._is_settling = True
        job.free()
        self._is_settling = False

    def _warn(self, error: str) -> None:
        """Once in a while: a disk that is full refuses many blocks a second."""
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + _WARNING_SECONDS
            logger.warning("KV transfer: blocks are not kept: %s", error)

    def _released(self, pool: BlockPool, block: KVCacheBlock) -> None:
        """No table holds a cached block any more."""
        if block.key is not None and not self._is_settling:
            self._candidates.append(_Candidate(pool, block, block.key))

    def _next_batch(self) -> list[_Candidate]:
        batch: list[_Candidate] = []
        while self._candidates and len(batch) < BLOCKS_PER_JOB:
            each = self._candidates[-1]
            if each.is_current and self._is_wanted(each.key):
                if not self._has_room(each.pool, len(batch)):
                    break
                each.pool.touch([each.block])
                self._saving.add(each.key)
                batch.append(each)
            self._candidates.pop()
        return batch

    def _is_wanted(self, key: BlockKey) -> bool:
        return key not in self._saving and not self._transfer.has(key)

    def _has_room(self, pool: BlockPool, num_more: int) -> bool:
        """Whether the pool can do without another block. One at a time is always taken if it is
        free, so that this comes to an end.
        """
        num_held = num_more + sum(len(job.held) for job in self.jobs.values())
        return num_held < max(min(pool.num_usable_blocks // SHARE_HELD, pool.num_free_blocks), 1)
