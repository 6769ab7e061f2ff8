"""Jobs in threads of their own: what is copied does not hold up the steps."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from tokenmill.contracts.kv_transfer import BlockCopy, RemoteOrigin, Transferred
from tokenmill.features.kv_transfer.pool_blocks import PoolBlocks

logger = logging.getLogger(__name__)

_NUM_LOADING_THREADS = 4
"""Another engine that is silent holds up one of them."""
_BLOCKS_AT_ONCE = 16


class BlockStore(Protocol):
    """A place for blocks. Called from any thread."""

    def has(self, key: bytes) -> bool:
        """Whether the block is there, for all that is known."""
        ...

    def read(self, key: bytes, num_bytes: int) -> torch.Tensor | None:
        """uint8 [num_bytes]; None if it is not there, or damaged."""
        ...

    def write(self, key: bytes, data: torch.Tensor) -> None:
        """Keep a block, uint8 [num_bytes]. Raises `OSError` if that fails."""
        ...


class Source(Protocol):
    """Blocks of other engines."""

    def fetch(
        self, origin: RemoteOrigin, blocks: Sequence[BlockCopy], num_bytes: int
    ) -> Iterable[tuple[list[BlockCopy], torch.Tensor]]:
        """Blocks as they come, uint8 [number of them, num_bytes]; raises if they do not."""
        ...

    def release(self, origin: RemoteOrigin) -> None:
        """They are not needed; raises if that cannot be told."""
        ...

    def shutdown(self) -> None:
        """End all connections."""
        ...


class Holder(Protocol):
    """Blocks for other engines."""

    def hold(self, job_id: int, request_id: str, blocks: Sequence[BlockCopy]) -> Mapping[str, Any]:
        """Hand out these blocks; what others must be told."""
        ...

    def shutdown(self) -> None:
        """Stop handing out."""
        ...


class Finished:
    """Jobs that are done, from any thread to the engine's."""

    def __init__(self) -> None:
        self._done: deque[Transferred] = deque()
        self._news = threading.Event()

    def put(self, done: Transferred) -> None:
        """A job is done."""
        self._done.append(done)
        self._news.set()

    def take(self) -> list[Transferred]:
        """All that are done."""
        self._news.clear()
        return [self._done.popleft() for _ in range(len(self._done))]

    def wait(self, seconds: float) -> None:
        """Until there is one, at most so long."""
        self._news.wait(seconds)

    def __bool__(self) -> bool:
        return bool(self._done)


class BlockTransfer:
    """A `KVTransfer` over places for blocks, and over other engines."""

    def __init__(
        self,
        root: bytes,
        pool: PoolBlocks,
        stores: Sequence[BlockStore],
        finished: Finished,
        *,
        source: Source | None = None,
        holder: Holder | None = None,
        fails_requests: bool = False,
    ) -> None:
        """`stores` are asked in their order, and all are given what is saved. Without `source`,
        nothing is fetched; without `holder`, nothing is given.
        """
        self.root = root
        self.fails_requests = fails_requests
        self.keeps_blocks = bool(stores)
        self._pool = pool
        self._stores = stores
        self._finished = finished
        self._source = source
        self._holder = holder
        self._loading = ThreadPoolExecutor(_NUM_LOADING_THREADS, "tokenmill-kv-load")
        self._saving = ThreadPoolExecutor(1, "tokenmill-kv-save")

    def has(self, key: bytes) -> bool:
        return any(store.has(key) for store in self._stores)

    def load(self, job_id: int, blocks: Sequence[BlockCopy], origin: RemoteOrigin | None) -> None:
        self._loading.submit(self._run, job_id, self._load, blocks, origin)

    def save(self, job_id: int, blocks: Sequence[BlockCopy]) -> None:
        self._saving.submit(self._run, job_id, self._save, blocks)

    def hold(self, job_id: int, request_id: str, blocks: Sequence[BlockCopy]) -> Mapping[str, Any]:
        assert self._holder is not None, "requests for other engines are refused where none are"
        return self._holder.hold(job_id, request_id, blocks)

    def release(self, origin: RemoteOrigin) -> None:
        self._loading.submit(self._release, origin)

    def take_finished(self) -> list[Transferred]:
        return self._finished.take()

    def has_finished(self) -> bool:
        return bool(self._finished)

    def wait(self, seconds: float) -> None:
        self._finished.wait(seconds)

    def shutdown(self) -> None:
        for jobs in (self._loading, self._saving):  # what has not begun would take as long again
            jobs.shutdown(cancel_futures=True)
        for each in (self._holder, self._source):
            if each is not None:
                each.shutdown()

    def _run(self, job_id: int, job: Callable[..., str | None], *args: Any) -> None:
        """Do a job; it ends, whatever happens."""
        copied: set[bytes] = set()
        try:
            error = job(copied, *args)
        except Exception as failure:  # the boundary of a thread that somebody waits for
            logger.debug("KV transfer failed", exc_info=True)
            error = str(failure) or type(failure).__name__
        self._finished.put(Transferred(job_id, frozenset(copied), error))

    def _load(
        self, copied: set[bytes], blocks: Sequence[BlockCopy], origin: RemoteOrigin | None
    ) -> str | None:
        """Why blocks are missing, as far as it is known."""
        for batch in _batches(blocks):
            self._load_kept(copied, batch)
        if origin is None or self._source is None:
            return None
        error = None
        try:
            missing = [block for block in blocks if block.key not in copied]
            for batch in _batches(missing, len(missing)):
                num_bytes = self._pool.block_bytes(batch[0].group)
                for found, data in self._source.fetch(origin, batch, num_bytes):
                    self._write(copied, found, data)
        except Exception as failure:  # noqa: BLE001 - the other engine is told all the same
            error = f"blocks of {origin.remote_host}: {failure}"
        self._release(origin)
        return error

    def _load_kept(self, copied: set[bytes], batch: Sequence[BlockCopy]) -> None:
        num_bytes = self._pool.block_bytes(batch[0].group)
        found, rows = [], []
        for block in batch:
            stored = (store.read(block.key, num_bytes) for store in self._stores)
            data = next((each for each in stored if each is not None), None)
            if data is not None:
                found.append(block)
                rows.append(data)
        if found:
            self._write(copied, found, torch.stack(rows))

    def _write(self, copied: set[bytes], blocks: Sequence[BlockCopy], data: torch.Tensor) -> None:
        self._pool.write(blocks[0].group, [block.block_id for block in blocks], data)
        copied.update(block.key for block in blocks)

    def _save(self, copied: set[bytes], blocks: Sequence[BlockCopy]) -> None:
        for batch in _batches(blocks):
            data = self._pool.read(batch[0].group, [block.block_id for block in batch])
            for block, row in zip(batch, data, strict=True):
                for store in self._stores:
                    store.write(block.key, row)
                copied.add(block.key)

    def _release(self, origin: RemoteOrigin) -> None:
        if self._source is None:
            return
        try:
            self._source.release(origin)
        except Exception as failure:  # noqa: BLE001 - it lets go of them by itself after a while
            logger.debug("KV transfer: %s was not told: %s", origin.remote_host, failure)


def _batches(
    blocks: Sequence[BlockCopy], size: int = _BLOCKS_AT_ONCE
) -> Iterable[Sequence[BlockCopy]]:
    """Blocks of one group each, in their order, at most `size` at once."""
    by_group: defaultdict[int, list[BlockCopy]] = defaultdict(list)
    for block in blocks:
        by_group[block.group].append(block)
    for each in by_group.values():
        for begin in range(0, len(each), size):
            yield each[begin : begin + size]
