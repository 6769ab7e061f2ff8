"""Block tables of the KV cache groups: layers that keep the same of every sequence.

full attention     [ 4 ][ 7 ][ 2 ][ 9 ][ 5 ]     all blocks, append-only
sliding window     [ 0 ][ 0 ][ 0 ][ 3 ][ 8 ]     the null block where the window has passed
states             [ 0 ][ 0 ][ 0 ][ 2 ][ 6 ]     likewise; a block holds the state behind its tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheKind
from tokenmill.core.kv.block_pool import BlockPool, KVCacheBlock, block_key
from tokenmill.core.kv.verify import HitVerifier
from tokenmill.core.request import Request
from tokenmill.errors import ConfigError


def _nobody_cares(request: Request, start: int, end: int) -> None:
    """Nobody wants to know."""


class FullAttentionGroup:
    """Keeps every token of a sequence.

    A layer with a sliding window is served as well: it reads less than is kept.
    """

    def __init__(
        self,
        index: int,
        group: KVCacheGroup,
        *,
        block_size: int,
        max_step_tokens: int,
        pool: BlockPool,
        verifier: HitVerifier,
    ) -> None:
        self._index = index
        self._group = group
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self.pool = pool
        self._verifier = verifier
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._num_cached: dict[str, int] = {}
        self._num_passed: dict[str, int] = {}
        """Null blocks at the beginning of tables."""
        self.on_store: Callable[[Request, int, int], None] = _nobody_cares
        """Called with the blocks of a request, from one position to another, that can be found."""

    @property
    def index(self) -> int:
        """Number of the group."""
        return self._index

    @property
    def keeps_all(self) -> bool:
        """Whether it keeps every token; else those that the next one needs."""
        return True

    @property
    def tables(self) -> Iterable[list[KVCacheBlock]]:
        return self._tables.values()

    def positions_needed(self, num_blocks: int) -> range:
        """Which of a sequence's first blocks must be there for it to go on behind them."""
        return range(num_blocks)

    def cached_block(self, request: Request, position: int) -> KVCacheBlock | None:
        """The cached block with the content of the request's block number `position`."""
        return self._find(request, position)

    def cache_block(self, request: Request, position: int, block: KVCacheBlock) -> None:
        """Make a block findable that has been filled with the content of the request's block."""
        self._verifier.remember(block, request, position)
        self.pool.cache_full_blocks([block], [request.block_hashes[position]], self._index)
        self.on_store(request, position, position + 1)

    def table_length(self, request_id: str) -> int:
        """Blocks of the request's sequence so far, null blocks among them."""
        table = self._tables.get(request_id)
        return 0 if table is None else len(table)

    def num_held(self, request_id: str) -> int:
        """Blocks that the request holds."""
        return self.table_length(request_id) - self._num_passed.get(request_id, 0)

    def num_new(self, count: int) -> int:
        """Blocks that `append_new` takes of the pool."""
        return count

    def num_free_hits(self, hits: list[KVCacheBlock]) -> int:
        """Hits that no table holds: taking them shortens the free list."""
        return sum(block.ref_count == 0 for block in self._real(hits))

    def num_kept(self, hits: list[KVCacheBlock]) -> int:
        """Hits that are not the null block."""
        return sum(1 for _ in self._real(hits))

    def blocks_needed(self, num_tokens: int) -> int:
        """Most blocks that a sequence of so many tokens holds at the same time."""
        return self._group.blocks_needed(num_tokens, self._block_size, self._max_step_tokens)

    def block_ids(self, request_id: str) -> list[int]:
        """The request's block table."""
        return [block.block_id for block in self._tables[request_id]]

    def find_longest_hit(self, request: Request, max_blocks: int) -> list[KVCacheBlock]:
        """Cached blocks for the beginning of the request's tokens, at most `max_blocks`."""
        hits: list[KVCacheBlock] = []
        for position in range(min(max_blocks, len(request.block_hashes))):
            block = self._find(request, position)
            if block is None:
                break
            hits.append(block)
        return hits

    def append_hits(self, request_id: str, hits: list[KVCacheBlock]) -> None:
        """Begin the request's table with cached blocks."""
        self.pool.touch(self._real(hits))
        self._tables[request_id] = list(hits)
        self._num_passed[request_id] = hits.count(self.pool.null_block)
        self._num_cached[request_id] = len(hits)

    def append_new(self, request_id: str, count: int) -> list[int]:
        """Append `count` blocks, fresh ones where they are needed; returns their ids."""
        num_new = self.num_new(count)
        blocks = [self.pool.null_block] * (count - num_new) + self.pool.get_new_blocks(num_new)
        self._tables.setdefault(request_id, []).extend(blocks)
        return [block.block_id for block in blocks]

    def release_passed(self, request_id: str, next_token: int) -> None:
        """Release what no query from the sequence's token `next_token` on will see."""

    def cache_blocks(self, request: Request, num_blocks: int) -> None:
        """Make the first `num_blocks` of the request's blocks findable, if they are not yet."""
        start = self._num_cached.get(request.request_id, 0)
        if num_blocks <= start:
            return
        table = self._tables[request.request_id]
        held = [at for at in range(start, num_blocks) if table[at] is not self.pool.null_block]
        for position in held:
            self._verifier.remember(table[position], request, position)
        hashes = [request.block_hashes[position] for position in held]
        self.pool.cache_full_blocks([table[position] for position in held], hashes, self._index)
        self._num_cached[request.request_id] = num_blocks
        if held:
            self.on_store(request, held[0], num_blocks)

    def forget(self, request_id: str) -> None:
        """Make the request's blocks unfindable; it keeps them."""
        self.pool.forget_blocks(self._tables.get(request_id, []))

    def free(self, request_id: str) -> None:
        """Release whatever the request holds, from the last block to the first; may be repeated."""
        self._num_cached.pop(request_id, None)
        self._num_passed.pop(request_id, None)
        self._release(self._tables.pop(request_id, []))

    def _release(self, blocks: list[KVCacheBlock]) -> None:
        self.pool.free_blocks(self._real(reversed(blocks)))

    def _real(self, blocks: Iterable[KVCacheBlock]) -> Iterator[KVCacheBlock]:
        return (block for block in blocks if block is not self.pool.null_block)

    def _find(self, request: Request, position: int) -> KVCacheBlock | None:
        block = self.pool.get_cached_block(block_key(request.block_hashes[position], self._index))
        if block is not None:
            self._verifier.verify(block, request, position)
        return block


class SlidingWindowGroup(FullAttentionGroup):
    """Keeps the tokens in the window of the next query; the null block stands for the others."""

    @property
    def _num_seen_before(self) -> int:
        """Tokens before a query that it sees."""
        assert self._group.spec.sliding_window is not None
        return self._group.spec.sliding_window - 1

    @property
    def keeps_all(self) -> bool:
        return False

    @property
    def _num_needed(self) -> int:
        """Blocks that the window behind a block needs."""
        return -(-self._num_seen_before // self._block_size)

    def positions_needed(self, num_blocks: int) -> range:
        return range(max(num_blocks - self._num_needed, 0), num_blocks)

    def find_longest_hit(self, request: Request, max_blocks: int) -> list[KVCacheBlock]:
        """Cached blocks that the window behind the longest hit needs, null blocks before them.

        Searched from the end: a gap ends every hit that is longer.
        """
        num_needed = self._num_needed
        end = min(max_blocks, len(request.block_hashes))
        found: list[KVCacheBlock] = []
        for position in range(end - 1, -1, -1):
            if len(found) == num_needed:
                break
            block = self._find(request, position)
            if block is None:
                end, found = position, []
            else:
                found.append(block)
        return [self.pool.null_block] * (end - len(found)) + found[::-1]

    def release_passed(self, request_id: str, next_token: int) -> None:
        num_passed = max(next_token - self._num_seen_before, 0) // self._block_size
        before = self._num_passed.get(request_id, 0)
        if num_passed <= before or request_id not in self._tables:
            return
        table = self._tables[request_id]
        self._release(table[before:num_passed])
        table[before:num_passed] = [self.pool.null_block] * (num_passed - before)
        self._num_passed[request_id] = num_passed


class StateGroup(SlidingWindowGroup):
    """Keeps the state behind the last token that is computed, and those that a hit may end with.

    A step writes the state behind its tokens, and behind the last whole block among them. So new
    blocks are real in these two places; what a chunk of a prompt passes before needs none.
    """

    _NUM_WRITTEN = 2

    def num_new(self, count: int) -> int:
        return min(count, self._NUM_WRITTEN)

    def num_held(self, request_id: str) -> int:
        table = self._tables.get(request_id, [])
        return self.num_kept(table[self._num_passed.get(request_id, 0) :])


_GROUPS = {
    KVCacheKind.FULL: FullAttentionGroup,
    KVCacheKind.SLIDING_WINDOW: SlidingWindowGroup,
    KVCacheKind.STATE: StateGroup,
}


def build_groups(
    config: KVCacheConfig,
    pools: Mapping[bool, BlockPool],
    make_verifier: Callable[[], HitVerifier],
    max_step_tokens: int,
) -> tuple[FullAttentionGroup, ...]:
    """One set of block tables per group; raises `ConfigError` for kinds that have no tables.

    `pools` are those of groups that keep states, and of the others. Each gets a verifier.
    """
    for group in config.groups:
        if group.spec.kind not in _GROUPS:
            raise ConfigError(
                f"KV cache group of {group.layer_names[0]}: kind {group.spec.kind.value!r} is not"
                " served; full, sliding_window and state are."
            )
    verifiers = {keeps_states: make_verifier() for keeps_states in pools}
    return tuple(
        _GROUPS[group.spec.kind](
            index,
            group,
            block_size=config.block_size,
            max_step_tokens=max_step_tokens,
            pool=pools[group.keeps_states],
            verifier=verifiers[group.keeps_states],
        )
        for index, group in enumerate(config.groups)
    )
