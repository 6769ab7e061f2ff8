"""Groups of states: which blocks are real, what a hit ends with, and a pool of their own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.core import create_kv_cache_config
from helpers.kv_groups import compute, make
from tokenmill.contracts.kv_cache import (
    KVCacheConfig,
    KVCacheGroup,
    KVCacheKind,
    KVCacheSpec,
    StateSpec,
)
from tokenmill.core.kv.manager import KVCacheManager
from tokenmill.core.limits import check_groups
from tokenmill.core.request import Request
from tokenmill.errors import ConfigError

STATE = KVCacheGroup(("mixer",), StateSpec(6, 3, 2, 4, 8))
TOKENS = list(range(3, 43))


def create_manager(num_blocks=40, num_state_blocks=20):
    attention = create_kv_cache_config(num_blocks, 4).groups
    config = KVCacheConfig(num_blocks, 4, (*attention, STATE), num_state_blocks)
    return KVCacheManager(
        config,
        max_model_len=256,
        enable_prefix_caching=True,
        max_step_tokens=64,
        verify_hits=True,
    )


def states_of(kv, request):
    return kv.block_ids(request)[1]


def test_sizes():
    spec = STATE.spec
    assert spec.kind is KVCacheKind.STATE
    assert spec.num_values == 6 * 3 + 2 * 4 * 8
    assert spec.bytes_per_block == 2 * 4 * spec.num_values
    assert [STATE.blocks_needed(n, 4, 64) for n in (1, 8, 9, 1000)] == [1, 2, 3, 3]
    attention = KVCacheGroup(("a",), KVCacheSpec(1, 8, "float32"))
    config = KVCacheConfig(9, 4, (attention, STATE), 5)
    assert config.bytes_per_block == 4 * attention.spec.bytes_per_token
    assert config.num_usable_tokens == 32
    assert config.blocks_needed(10, 64) == 3


def test_a_chunk_has_a_state_behind_its_last_whole_block_and_one_at_its_end():
    kv = create_manager()
    request = make(TOKENS)
    compute(kv, request, 18)
    assert [i > 0 for i in states_of(kv, request)] == [False, False, False, True, True]
    checkpoint, last = states_of(kv, request)[3:]
    compute(kv, request, 1)  # within the block
    assert states_of(kv, request)[3:] == [checkpoint, last]
    compute(kv, request, 15)  # tokens 19 to 33
    table = states_of(kv, request)
    assert table[4] == last  # its state is read, and that behind token 19 is written there, too
    assert [i > 0 for i in table] == [False] * 4 + [True, False, False, True, True]
    assert kv.state_pool.num_used_blocks == 3
    assert kv.pool.num_used_blocks == 9
    compute(kv, request, 3)
    assert [i > 0 for i in states_of(kv, request)] == [False] * 8 + [True, True]
    kv.free(request)
    assert kv.state_pool.num_used_blocks == kv.pool.num_used_blocks == 0


def test_a_hit_ends_where_a_state_is():
    kv = create_manager()
    first = make(TOKENS)
    compute(kv, first, 18)
    compute(kv, first, 22)
    ids = kv.block_ids(first)
    for length, num_tokens in ((40, 36), (39, 36), (36, 20), (21, 20), (20, 16), (17, 16), (16, 0)):
        computed = kv.get_computed_blocks(make(TOKENS[:length]))
        assert computed.num_tokens == num_tokens, length
    second = make([*TOKENS[:38], 1, 1])
    computed = kv.get_computed_blocks(second)
    compute(kv, second, 4, computed)
    whole, states = kv.block_ids(second)
    assert whole[:9] == ids[0][:9]
    assert states[:8] == [0] * 8
    assert states[8] not in (0, *ids[1][9:])
    assert states[9] not in (0, *ids[1])
    kv.free(first)
    kv.free(second)
    assert kv.audit() == []


def test_each_pool_must_have_room():
    kv = create_manager(num_blocks=100, num_state_blocks=6)
    first, second, third = make(TOKENS), make(TOKENS[::-1]), make(TOKENS)
    compute(kv, first, 40)
    compute(kv, second, 40)
    assert kv.state_pool.num_used_blocks == 4
    assert kv.allocate_slots(third, 5) is None
    assert kv.audit() == []
    assert kv.allocate_slots(third, 4) is not None
    kv.free(first)
    assert not kv.reset_prefix_cache()
    kv.free(second)
    kv.free(third)
    assert kv.reset_prefix_cache()
    assert kv.get_computed_blocks(make(TOKENS)).num_tokens == 0


def test_a_leak_of_states_is_repaired(caplog):
    kv = create_manager()
    kv.state_pool.get_new_blocks(1)
    kv.repair_leak()
    assert "block 1 counts 1 tables, 0 hold it" in caplog.text
    assert kv.state_pool.num_used_blocks == 0


def test_drafts_are_refused():
    check_groups([STATE], 0)
    with pytest.raises(ConfigError, match="but mixer keeps one state of all"):
        check_groups([STATE], 2)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 15)), min_size=1, max_size=40),
)
def test_a_step_always_reads_and_writes_real_blocks(steps):
    """Four requests with common beginnings, in any chunks; each ends and begins again."""
    kv = create_manager(num_blocks=200, num_state_blocks=30)
    running: dict[int, Request] = {}
    for which, count in steps:
        request = running.get(which)
        computed = None
        if request is None:
            request = running[which] = make(TOKENS[: 12 + 8 * which])
            computed = kv.get_computed_blocks(request)
        hits = 0 if computed is None else computed.num_tokens
        begin = request.num_computed_tokens + hits
        count = min(count, request.num_tokens - begin)
        compute(kv, request, count, computed)
        table = states_of(kv, request)
        if begin:
            assert table[(begin - 1) // 4]
        assert table[(begin + count - 1) // 4]
        assert sum(map(bool, table)) <= 3
        if request.num_computed_tokens == request.num_tokens:
            kv.free(running.pop(which))
    for request in running.values():
        kv.free(request)
    assert kv.audit() == []
    assert kv.state_pool.num_used_blocks == 0
