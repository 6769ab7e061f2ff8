"""Hits, slots, caching and release, seen through the manager."""

from __future__ import annotations

import pytest

from helpers.core import create_kv_cache_config, create_request
from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheKind, KVCacheSpec
from tokenmill.core.kv.manager import KVCacheManager
from tokenmill.core.request import Request
from tokenmill.errors import ConfigError


def create_manager(num_blocks=11, block_size=16, *, caching=True, max_model_len=256, num_groups=1):
    return KVCacheManager(
        create_kv_cache_config(num_blocks, block_size, num_groups),
        max_model_len=max_model_len,
        enable_prefix_caching=caching,
        max_step_tokens=max_model_len,
        verify_hits=True,
    )


def make(prompt, **kwargs):
    return Request(create_request(prompt, **kwargs), max_total_tokens=10_000)


def enter(kv, request, num_new_tokens=None):
    """Look up, allocate and settle; returns (hit tokens, new blocks), or None if it did not fit."""
    computed = kv.get_computed_blocks(request)
    count = num_new_tokens or request.num_tokens - computed.num_tokens
    new_block_ids = kv.allocate_slots(request, count, computed=computed)
    if new_block_ids is None:
        return None
    request.num_computed_tokens = computed.num_tokens + count
    kv.cache_blocks(request, request.num_computed_tokens)
    return computed.num_tokens, new_block_ids[0]


def grow(kv, request, token_ids):
    """Append tokens whose KV is computed."""
    request.all_token_ids += token_ids
    assert kv.allocate_slots(request, len(token_ids)) is not None
    request.num_computed_tokens += len(token_ids)
    kv.cache_blocks(request, request.num_computed_tokens)


COMMON = [position // 16 for position in range(48)]


def test_prefill_shares_full_blocks_and_frees_in_the_documented_order():
    """Ten blocks, two requests that share three: the worked example of the free list."""
    kv = create_manager()
    first, second = make(COMMON + [3] * 7), make(COMMON + [4] * 5)
    assert enter(kv, first) == (0, [1, 2, 3, 4])
    assert enter(kv, second) == (48, [5])
    assert [kv.pool.blocks[number].ref_count for number in (1, 2, 3, 4, 5)] == [2, 2, 2, 1, 1]
    kv.free(first)
    kv.free(second)
    assert kv.pool.free_block_ids() == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    assert kv.audit() == []

    third = make(COMMON + [5] * 7)
    assert enter(kv, third) == (48, [5])
    kv.free(third)
    assert kv.pool.free_block_ids() == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]

    assert enter(kv, make([9] * 160)) == (0, [5, 4, 6, 7, 8, 9, 10, 3, 2, 1])
    assert kv.get_computed_blocks(third).num_tokens == 0


def test_free_may_be_repeated():
    kv = create_manager()
    request = make(COMMON)
    enter(kv, request)
    kv.free(request)
    order = kv.pool.free_block_ids()
    kv.free(request)
    assert kv.pool.free_block_ids() == order


@pytest.mark.parametrize("length", range(1, 14))
def test_b073_at_least_the_last_token_is_computed_again(length):
    kv = create_manager(block_size=4)
    prompt = list(range(20, 20 + length))
    enter(kv, make(prompt, request_id="a"))
    hit, _ = enter(kv, make(prompt, request_id="b"))
    assert hit == (length - 1) // 4 * 4


def test_blocks_become_findable_exactly_when_full():
    kv = create_manager(block_size=4)
    request = make([1, 2, 3])
    enter(kv, request)
    probe = make([1, 2, 3, 4, 5, 6, 7, 8, 9])
    for token_id, expected in zip(range(4, 10), [4, 4, 4, 4, 8, 8], strict=True):
        grow(kv, request, [token_id])
        assert kv.get_computed_blocks(probe).num_tokens == expected


def test_only_settled_and_known_tokens_are_cached():
    kv = create_manager(block_size=4)
    request = make([1, 2, 3, 4, 5, 6, 7, 8])
    assert kv.allocate_slots(request, 8, num_lookahead_tokens=8) is not None
    kv.cache_blocks(request, 7)
    assert kv.get_computed_blocks(make([1, 2, 3, 4, 5, 6, 7, 8, 9])).num_tokens == 4
    kv.cache_blocks(request, 14)
    assert kv.get_computed_blocks(make([1, 2, 3, 4, 5, 6, 7, 8, 9])).num_tokens == 8
    assert sum(block.key is not None for block in kv.pool.blocks) == 2


def test_equal_blocks_are_not_merged():
    kv = create_manager()
    first, second = make(COMMON, request_id="a"), make(COMMON, request_id="b")
    for request in (first, second):
        assert kv.allocate_slots(request, 48) is not None
        kv.cache_blocks(request, 48)
    assert kv.block_ids(first) == ([1, 2, 3],)
    assert kv.block_ids(second) == ([4, 5, 6],)
    probe = make([*COMMON, 1])
    assert [block.block_id for block in kv.get_computed_blocks(probe).blocks[0]] == [1, 2, 3]


def test_prompt_logprobs_fill_the_cache_but_do_not_read_it():
    kv = create_manager()
    assert enter(kv, make([*COMMON, 7], prompt_logprobs=0)) == (0, [1, 2, 3, 4])
    assert enter(kv, make([*COMMON, 8], prompt_logprobs=0)) == (0, [5, 6, 7, 8])
    assert enter(kv, make([*COMMON, 9])) == (48, [9])


def test_a_hit_that_cannot_be_completed_changes_nothing():
    kv = create_manager()
    first = make(COMMON)
    enter(kv, first)
    enter(kv, make([8] * 48, request_id="other"))
    counts = [block.ref_count for block in kv.pool.blocks]
    free = kv.pool.free_block_ids()
    assert enter(kv, make(COMMON + [9] * 80)) is None  # 5 more blocks, 4 are free
    assert [block.ref_count for block in kv.pool.blocks] == counts
    assert kv.pool.free_block_ids() == free
    assert kv.audit() == []


def test_free_hits_are_not_counted_as_room_for_new_blocks():
    kv = create_manager()
    first = make(COMMON)
    enter(kv, first)
    kv.free(first)
    enter(kv, make([8] * 96, request_id="other"))
    assert kv.pool.num_free_blocks == 4  # three of them are the hits
    assert enter(kv, make(COMMON + [9] * 32)) is None
    assert enter(kv, make(COMMON + [9] * 16)) == (48, [10])


def test_blocks_of_a_running_request_are_not_evicted():
    kv = create_manager(num_blocks=4)
    enter(kv, make(COMMON[:32]))
    held = kv.get_computed_blocks(make(COMMON))
    assert enter(kv, make([9] * 32, request_id="big")) is None
    enter(kv, make([9] * 16, request_id="small"))
    assert kv.get_computed_blocks(make(COMMON)) == held


def test_lookahead_slots_are_allocated_and_used():
    kv = create_manager(block_size=4)
    request = make([1, 2, 3])
    assert kv.allocate_slots(request, 3, num_lookahead_tokens=3) == ([1, 2],)
    request.num_computed_tokens = 3
    assert kv.allocate_slots(request, 1, num_lookahead_tokens=3) == ([],)
    request.num_computed_tokens = 4
    assert kv.allocate_slots(request, 1, num_lookahead_tokens=4) == ([3],)


def test_lookahead_ends_with_the_longest_sequence():
    kv = create_manager(block_size=4, max_model_len=8)
    assert kv.allocate_slots(make([1, 2, 3, 4, 5, 6, 7]), 7, num_lookahead_tokens=9) == ([1, 2],)


def test_the_whole_sequence_must_fit_when_asked():
    kv = create_manager(num_blocks=4, block_size=4)
    request = make(list(range(16)))
    assert kv.allocate_slots(request, 4, num_must_fit=16) == ([1],)  # cut to the pool: 12
    other = make(list(range(20, 33)))
    assert kv.allocate_slots(other, 4, num_must_fit=12) is None
    assert kv.allocate_slots(other, 4, num_must_fit=8) == ([2],)


def test_without_caching_nothing_is_found_or_kept():
    kv = create_manager(caching=False)
    first = make(COMMON)
    enter(kv, first)
    kv.free(first)
    computed = kv.get_computed_blocks(make([*COMMON, 1]))
    assert (computed.num_tokens, computed.num_queried_tokens) == (0, 0)
    assert kv.pool.free_block_ids() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_every_group_has_tables_of_its_own():
    kv = create_manager(block_size=4, num_groups=2)
    first = make([1, 2, 3, 4, 5])
    assert kv.num_usable_tokens == 20
    assert kv.allocate_slots(first, 5) == ([1, 2], [3, 4])
    kv.cache_blocks(first, 5)
    second = make([1, 2, 3, 4, 6])
    computed = kv.get_computed_blocks(second)
    assert [[block.block_id for block in hits] for hits in computed.blocks] == [[1], [3]]
    assert kv.allocate_slots(second, 1, computed=computed) == ([5], [6])
    assert kv.block_ids(second) == ([1, 5], [3, 6])
    assert (kv.pool.num_used_blocks, kv.pool.num_usable_blocks) == (6, 10)
    assert kv.audit() == []


def test_a_kind_without_block_tables_is_refused():
    spec = KVCacheSpec(1, 8, "float32", kind=KVCacheKind.CROSS)
    config = KVCacheConfig(8, 4, (KVCacheGroup(("mixer.0",), spec),))
    with pytest.raises(ConfigError, match=r"mixer\.0: kind 'cross'"):
        KVCacheManager(config, max_model_len=8, enable_prefix_caching=True, max_step_tokens=8)


def test_b083_a_leak_is_logged_and_repaired(caplog):
    kv = create_manager()
    kv.repair_leak()
    assert not caplog.records
    kv.pool.get_new_blocks(2)
    kv.repair_leak()
    assert "block 1 counts 1 tables, 0 hold it" in caplog.text
    assert kv.pool.num_used_blocks == 0
    assert kv.audit() == []
