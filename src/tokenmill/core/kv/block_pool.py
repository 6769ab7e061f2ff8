"""All blocks of the KV cache: reference counts, the free list, and cached blocks by hash.

    free list, next to be handed out first:

      released without a hash   never used    released with a hash (cached, least recent first)
      [ last in, first out ] [ in order ] [ ............................................ ]

A cached block stays findable while it is free; it loses its hash when it is handed out again. A
request releases its blocks from the last to the first, so that the end of a prefix goes before
its beginning, without which it could not be found. Block 0 is the null block and never moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NewType

from tokenmill.errors import ConfigError

BlockKey = NewType("BlockKey", bytes)
"""Block hash and the group's number: groups keep different KV of the same tokens."""

_INDEX_BYTES = 4


def block_key(block_hash: bytes, group_index: int) -> BlockKey:
    """Key of the block with this hash in this KV cache group."""
    return BlockKey(block_hash + group_index.to_bytes(_INDEX_BYTES, "little"))


def hash_of(key: BlockKey) -> bytes:
    """The block hash in a key."""
    return key[:-_INDEX_BYTES]


def group_index_of(key: BlockKey) -> int:
    """Number of the group whose block has this key."""
    return int.from_bytes(key[-_INDEX_BYTES:], "little")


class KVCacheBlock:
    """One block: a number, who holds it, what it is known to contain."""

    __slots__ = ("block_id", "key", "next_free", "previous_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        """Block tables that hold it; 0 is free."""
        self.key: BlockKey | None = None
        """Set while the block is full, settled and findable."""
        self.previous_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_count={self.ref_count}, key={self.key!r})"


class FreeBlockQueue:
    """A doubly linked list through the blocks themselves; every operation takes O(1)."""

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free = self._tail
        self._tail.previous_free = self._head
        self._count = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def popleft(self) -> KVCacheBlock:
        """The next block to be handed out; there must be one."""
        block = self._head.next_free
        assert self._count, "no free block is left"
        assert block is not None
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, wherever it stands."""
        before, after = block.previous_free, block.next_free
        assert before is not None, f"{block} is not in the free list"
        assert after is not None, f"{block} is not in the free list"
        before.next_free = after
        after.previous_free = before
        block.previous_free = block.next_free = None
        self._count -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the end: it is handed out last."""
        assert self._tail.previous_free is not None
        self._insert(self._tail.previous_free, block, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        """Put a block at the front: it is handed out next."""
        assert self._head.next_free is not None
        self._insert(self._head, block, self._head.next_free)

    def _insert(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        assert block.next_free is None, f"{block} is in the free list already"
        block.previous_free, block.next_free = before, after
        before.next_free = after.previous_free = block
        self._count += 1


class CachedBlockMap:
    """Cached blocks by key. Several may have the same one; the first that came is found."""

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, dict[int, KVCacheBlock]] = {}

    def __len__(self) -> int:
        return sum(len(chain) for chain in self._blocks.values())

    def __iter__(self) -> Iterator[KVCacheBlock]:
        for chain in self._blocks.values():
            yield from chain.values()

    def get(self, key: BlockKey) -> KVCacheBlock | None:
        chain = self._blocks.get(key)
        return None if chain is None else next(iter(chain.values()))

    def insert(self, key: BlockKey, block: KVCacheBlock) -> None:
        self._blocks.setdefault(key, {})[block.block_id] = block

    def remove(self, key: BlockKey, block: KVCacheBlock) -> None:
        chain = self._blocks[key]
        del chain[block.block_id]
        if not chain:
            del self._blocks[key]

    def clear(self) -> None:
        self._blocks.clear()


def _nobody_cares(*what: object) -> None:
    """Nobody wants to know."""


class BlockPool:
    """Hands out blocks, takes them back, and finds those whose contents are known."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"num_kv_blocks={num_blocks}: the KV cache needs at least 2 blocks, since block 0"
                " is kept aside. Raise num_kv_blocks or the KV cache's share of the memory."
            )
        self.num_blocks = num_blocks
        self._cached = CachedBlockMap()
        self.on_release: Callable[[KVCacheBlock], None] = _nobody_cares
        """Called with every cached block that no table holds any more."""
        self.on_forget: Callable[[BlockKey], None] = _nobody_cares
        """Called with every key that nothing can be found under any more."""
        self.on_clear: Callable[[], None] = _nobody_cares
        """Called when all that was cached is forgotten at once."""
        self._build()

    def _build(self) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(self.num_blocks)]
        self.null_block = self.blocks[0]
        self._free = FreeBlockQueue(self.blocks[1:])
        self._cached.clear()

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_usable_blocks - len(self._free)

    def free_block_ids(self) -> list[int]:
        """Free blocks in the order in which they will be handed out."""
        return [block.block_id for block in self._free]

    def get_cached_block(self, key: BlockKey) -> KVCacheBlock | None:
        """The block with this content, in use or free, if there is one."""
        return self._cached.get(key)

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        """Hand out `count` blocks; so many must be free. What was cached in them is forgotten."""
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            block.ref_count = 1
        self.forget_blocks(blocks)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more table holds these cached blocks; a free one leaves the free list."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One table less holds these blocks. Give them from the last of a sequence to the first."""
        for block in blocks:
            assert block.ref_count > 0, f"{block} is freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.key is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)
                    self.on_release(block)

    def cache_full_blocks(
        self, blocks: Sequence[KVCacheBlock], hashes: Sequence[bytes], group_index: int
    ) -> None:
        """Make full, settled blocks findable under their hashes (parallel lists)."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            assert block.key is None, f"{block} is cached already"
            block.key = block_key(block_hash, group_index)
            self._cached.insert(block.key, block)

    def forget_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Make these blocks unfindable; their tables keep them."""
        for block in blocks:
            if block.key is not None:
                self._cached.remove(block.key, block)
                if self._cached.get(block.key) is None:
                    self.on_forget(block.key)
                block.key = None

    def reset_prefix_cache(self) -> bool:
        """Forget all cached contents; refused (False) while any block is in use."""
        if self.num_used_blocks:
            return False
        for block in self._cached:
            block.key = None
        self._cached.clear()
        self.on_clear()
        return True

    def rebuild(self) -> None:
        """Start again with all blocks free and nothing cached; no table may hold a block."""
        self._build()
        self.on_clear()

    def audit(self, tables: Iterable[Iterable[KVCacheBlock]]) -> list[str]:
        """Everything that is wrong, in words, given all block tables. Takes O(blocks).

        The null block may be in any table, and counts none.
        """
        held = [0] * self.num_blocks
        for table in tables:
            for block in table:
                held[block.block_id] += block is not self.null_block
        free = self.free_block_ids()
        cached = list(self._cached)
        problems = [
            f"block {block.block_id} counts {block.ref_count} tables, {count} hold it"
            for block, count in zip(self.blocks, held, strict=True)
            if block.ref_count != count
        ]
        expected_free = {block.block_id for block in self.blocks[1:] if held[block.block_id] == 0}
        if len(free) != len(set(free)) or len(free) != self.num_free_blocks:
            problems.append(f"the free list holds a block twice or miscounts: {free}")
        if set(free) != expected_free:
            problems.append(f"free list {sorted(free)}, but {sorted(expected_free)} are not held")
        if {block.block_id for block in cached} != {
            block.block_id for block in self.blocks if block.key is not None
        }:
            problems.append("blocks with a key and blocks in the map differ")
        return problems
