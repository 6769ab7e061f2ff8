"""Block tables of one KV cache group: layers that keep the same of every sequence."""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheKind
from tokenmill.core.kv.block_pool import BlockPool, KVCacheBlock, block_key
from tokenmill.core.kv.verify import HitVerifier
from tokenmill.core.request import Request
from tokenmill.errors import ConfigError


class FullAttentionGroup:
    """Keeps every token of a sequence; a table is append-only.

    A layer with a sliding window is served as well: it reads less than is kept.
    """

    def __init__(self, index: int, block_size: int, pool: BlockPool, verifier: HitVerifier) -> None:
        self._index = index
        self._block_size = block_size
        self._pool = pool
        self._verifier = verifier
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._num_cached: dict[str, int] = {}

    @property
    def tables(self) -> Iterable[list[KVCacheBlock]]:
        return self._tables.values()

    def table_length(self, request_id: str) -> int:
        """Blocks that the request holds."""
        table = self._tables.get(request_id)
        return 0 if table is None else len(table)

    def block_ids(self, request_id: str) -> list[int]:
        """The request's block table."""
        return [block.block_id for block in self._tables[request_id]]

    def find_longest_hit(self, request: Request, max_blocks: int) -> list[KVCacheBlock]:
        """Cached blocks for the beginning of the request's tokens, at most `max_blocks`."""
        hits: list[KVCacheBlock] = []
        for position, block_hash in enumerate(request.block_hashes[:max_blocks]):
            block = self._pool.get_cached_block(block_key(block_hash, self._index))
            if block is None:
                break
            self._verifier.verify(block, request, position)
            hits.append(block)
        return hits

    def append_hits(self, request_id: str, hits: list[KVCacheBlock]) -> None:
        """Begin the request's table with cached blocks."""
        self._pool.touch(hits)
        self._tables[request_id] = list(hits)
        self._num_cached[request_id] = len(hits)

    def append_new(self, request_id: str, count: int) -> list[int]:
        """Append `count` fresh blocks; returns their ids."""
        blocks = self._pool.get_new_blocks(count)
        self._tables.setdefault(request_id, []).extend(blocks)
        return [block.block_id for block in blocks]

    def cache_blocks(self, request: Request, num_blocks: int) -> None:
        """Make the first `num_blocks` of the request's blocks findable, if they are not yet."""
        start = self._num_cached.get(request.request_id, 0)
        if num_blocks <= start:
            return
        blocks = self._tables[request.request_id][start:num_blocks]
        for position, block in enumerate(blocks, start):
            self._verifier.remember(block, request, position)
        self._pool.cache_full_blocks(blocks, request.block_hashes[start:num_blocks], self._index)
        self._num_cached[request.request_id] = num_blocks

    def forget(self, request_id: str) -> None:
        """Make the request's blocks unfindable; it keeps them."""
        self._pool.forget_blocks(self._tables.get(request_id, []))

    def free(self, request_id: str) -> None:
        """Release whatever the request holds, from the last block to the first; may be repeated."""
        self._num_cached.pop(request_id, None)
        self._pool.free_blocks(reversed(self._tables.pop(request_id, [])))


def build_groups(
    config: KVCacheConfig, pool: BlockPool, verifier: HitVerifier
) -> tuple[FullAttentionGroup, ...]:
    """One set of block tables per group; raises `ConfigError` for kinds that have no tables."""
    for group in config.groups:
        if group.spec.kind not in (KVCacheKind.FULL, KVCacheKind.SLIDING_WINDOW):
            raise ConfigError(
                f"KV cache group of {group.layer_names[0]}: kind {group.spec.kind.value!r} is not"
                " served; full and sliding_window are."
            )
    return tuple(
        FullAttentionGroup(index, config.block_size, pool, verifier)
        for index in range(len(config.groups))
    )
