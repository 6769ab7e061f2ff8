"""The free list, reference counts, and cached blocks by hash."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from tokenmill.core.kv.block_pool import BlockPool, FreeBlockQueue, KVCacheBlock, block_key
from tokenmill.errors import ConfigError


def linked(queue):
    """Ids forwards, after checking that the links backwards agree."""
    forwards = list(queue)
    backwards, block = [], queue._tail.previous_free
    while block is not queue._head:
        backwards.append(block)
        block = block.previous_free
    assert forwards == backwards[::-1]
    assert len(queue) == len(forwards)
    return [block.block_id for block in forwards]


def test_free_queue_operations_keep_links_and_counts():
    blocks = [KVCacheBlock(number) for number in range(5)]
    queue = FreeBlockQueue(blocks)
    assert queue.popleft() is blocks[0]
    queue.remove(blocks[2])
    assert linked(queue) == [1, 3, 4]
    queue.append(blocks[0])
    queue.prepend(blocks[2])
    assert linked(queue) == [2, 1, 3, 4, 0]
    while len(queue):
        queue.popleft()
    assert linked(queue) == []


def test_free_queue_refuses_double_entries_and_strangers():
    block = KVCacheBlock(7)
    queue = FreeBlockQueue([block])
    with pytest.raises(AssertionError, match="already"):
        queue.append(block)
    queue.remove(block)
    with pytest.raises(AssertionError, match="not in the free list"):
        queue.remove(block)
    with pytest.raises(AssertionError, match="no free block"):
        queue.popleft()


def test_block_zero_is_never_handed_out():
    pool = BlockPool(5)
    assert [block.block_id for block in pool.get_new_blocks(4)] == [1, 2, 3, 4]
    assert pool.num_free_blocks == 0
    assert pool.null_block.block_id == 0


def test_a_pool_of_one_block_is_refused():
    with pytest.raises(ConfigError, match="num_kv_blocks=1"):
        BlockPool(1)


def test_the_first_of_two_equal_blocks_is_found_and_both_stay():
    pool = BlockPool(6)
    first, second = pool.get_new_blocks(2)
    pool.cache_full_blocks([first], [b"h"], 0)
    pool.cache_full_blocks([second], [b"h"], 0)
    assert pool.get_cached_block(block_key(b"h", 0)) is first
    assert pool.get_cached_block(block_key(b"h", 1)) is None
    pool.free_blocks([first])
    pool.get_new_blocks(4)  # the last of these evicts `first`
    assert first.key is None
    assert pool.get_cached_block(block_key(b"h", 0)) is second


def test_a_hit_on_a_free_block_leaves_the_middle_of_the_list():
    pool = BlockPool(6)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks, [b"a", b"b", b"c"], 0)
    pool.free_blocks(reversed(blocks))
    assert pool.free_block_ids() == [4, 5, 3, 2, 1]
    pool.touch([blocks[1]])
    assert pool.free_block_ids() == [4, 5, 3, 1]
    assert blocks[1].ref_count == 1


def test_eviction_happens_when_a_block_is_handed_out():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks, [b"a", b"b", b"c"], 0)
    pool.free_blocks(reversed(blocks))
    assert pool.get_cached_block(block_key(b"c", 0)) is blocks[2]
    pool.get_new_blocks(1)
    found = [pool.get_cached_block(block_key(name, 0)) for name in (b"a", b"b", b"c")]
    assert found == [blocks[0], blocks[1], None]


def test_reset_is_refused_while_a_block_is_used():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(blocks, [b"a"], 0)
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(block_key(b"a", 0)) is blocks[0]
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(block_key(b"a", 0)) is None
    assert pool.audit([]) == []


def test_freeing_twice_is_caught():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free_blocks(blocks)


def test_the_audit_names_what_is_wrong():
    pool = BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    assert pool.audit([[block]]) == []
    assert any("counts 1 tables, 0 hold it" in problem for problem in pool.audit([]))
    block.key = block_key(b"a", 0)
    assert any("map differ" in problem for problem in pool.audit([[block]]))
    pool.rebuild()
    assert pool.audit([]) == []


@pytest.mark.parametrize("seed", range(5))
def test_free_order_equals_a_model(seed):
    """Front for blocks without a hash, end for those with one, tail of a sequence first."""
    rnd = random.Random(seed)
    pool = BlockPool(20)
    free = OrderedDict.fromkeys(range(1, 20))
    keys, tables = {}, []
    for number in range(400):
        if rnd.random() < 0.5 and free:
            count = rnd.randrange(1, min(4, len(free)) + 1)
            expected = [free.popitem(last=False)[0] for _ in range(count)]
            table = pool.get_new_blocks(count)
            assert [block.block_id for block in table] == expected
            num_full = rnd.randrange(count + 1)
            for position in expected:
                keys.pop(position, None)
            hashes = [f"{number}.{position}".encode() for position in range(num_full)]
            pool.cache_full_blocks(table[:num_full], hashes, 0)
            keys.update(zip(expected, hashes, strict=False))
            tables.append(table)
        elif tables:
            table = tables.pop(rnd.randrange(len(tables)))
            pool.free_blocks(reversed(table))
            for block in reversed(table):
                free[block.block_id] = None
                free.move_to_end(block.block_id, last=block.block_id in keys)
        assert pool.free_block_ids() == list(free)
        assert pool.audit(tables) == []
        assert {block.block_id for block in pool._cached} == set(keys)
