"""Groups with a window: what is released, found again, and needed at most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.core import create_kv_cache_config
from helpers.kv_groups import compute, make
from tokenmill.core.kv.manager import KVCacheManager


def create_manager(windows, num_blocks=40, *, max_step_tokens=16, max_model_len=256):
    return KVCacheManager(
        create_kv_cache_config(num_blocks, 4, windows=windows),
        max_model_len=max_model_len,
        enable_prefix_caching=True,
        max_step_tokens=max_step_tokens,
        verify_hits=True,
    )


def run(kv, prompt, chunk=4):
    request = make(prompt)
    while request.num_computed_tokens < request.num_tokens:
        compute(kv, request, min(chunk, request.num_tokens - request.num_computed_tokens))
    return request


TOKENS = list(range(3, 43))


def test_blocks_that_the_window_has_passed_are_released_and_the_whole_group_keeps_all():
    kv = create_manager([None, 6])
    request = run(kv, TOKENS)
    whole, windowed = kv.block_ids(request)
    assert len(whole) == len(windowed) == 10
    assert 0 not in whole
    # The step of tokens 36 to 39 began with a query that sees 31 to 36.
    assert windowed[:7] == [0] * 7
    assert 0 not in windowed[7:]
    assert kv.pool.num_used_blocks == 10 + 3
    kv.free(request)
    assert kv.pool.num_used_blocks == 0
    assert kv.audit() == []


@pytest.mark.parametrize(("window", "num_kept"), [(1, 1), (2, 2), (5, 2), (6, 3), (9, 3), (99, 10)])
def test_a_query_keeps_the_tokens_of_its_window(window, num_kept):
    kv = create_manager([window])
    request = run(kv, TOKENS)
    (table,) = kv.block_ids(request)
    assert table.count(0) == 10 - num_kept
    assert kv.pool.num_used_blocks == num_kept


@pytest.mark.parametrize(("num_lookahead", "num_passed"), [(0, 4), (2, 3), (5, 3), (6, 2)])
def test_what_a_rejected_draft_would_need_again_is_kept(num_lookahead, num_passed):
    """Of 20 tokens as many as there are lookahead slots may have been drafts; the window is 4."""
    kv = create_manager([4])
    request = make([*TOKENS[:20], 50])
    compute(kv, request, 20)
    assert kv.allocate_slots(request, 1, num_lookahead_tokens=num_lookahead) is not None
    (table,) = kv.block_ids(request)
    assert [block_id == 0 for block_id in table].index(False) == num_passed
    assert kv.audit() == []


def test_a_hit_needs_only_the_blocks_of_the_window():
    kv = create_manager([None, 6])
    kv.free(run(kv, TOKENS))
    second = make([*TOKENS, 50, 51])
    computed = kv.get_computed_blocks(second)
    assert computed.num_tokens == 40
    whole, windowed = computed.blocks
    assert 0 not in [block.block_id for block in whole]
    assert [block.block_id == 0 for block in windowed] == [True] * 8 + [False] * 2
    compute(kv, second, 2, computed)
    assert kv.pool.num_used_blocks == 11 + 3


def test_a_gap_in_the_window_shortens_the_hit_of_all_groups():
    kv = create_manager([None, 6])
    first = run(kv, TOKENS)
    table = kv.block_ids(first)[1]
    kv.free(first)
    kv.pool.forget_blocks([kv.pool.blocks[table[9]]])
    computed = kv.get_computed_blocks(make([*TOKENS, 50]))
    # Blocks 7 and 8 of the window are there: enough for a hit of nine blocks.
    assert computed.num_tokens == 36
    assert [len(blocks) for blocks in computed.blocks] == [9, 9]
    kv.pool.forget_blocks([computed.blocks[0][4]])
    assert kv.get_computed_blocks(make([*TOKENS, 50])).num_tokens == 16


def test_two_windows_agree_on_one_length():
    kv = create_manager([5, 9])
    first = run(kv, TOKENS)
    narrow, wide = kv.block_ids(first)
    kv.free(first)
    kv.pool.forget_blocks([kv.pool.blocks[wide[9]], kv.pool.blocks[narrow[8]]])
    computed = kv.get_computed_blocks(make([*TOKENS, 50]))
    # The wide window lacks block 9, the narrow one block 8: eight blocks are common to both.
    assert computed.num_tokens == 32
    assert [len(blocks) for blocks in computed.blocks] == [8, 8]


def test_an_early_hit_is_shorter_than_the_window():
    kv = create_manager([30])
    kv.free(run(kv, TOKENS[:12]))
    assert kv.get_computed_blocks(make(TOKENS)).num_tokens == 12


@given(
    windows=st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=4),
    num_blocks=st.integers(2, 60),
    max_step_tokens=st.integers(1, 40),
)
def test_the_longest_sequence_that_fits_can_be_computed_and_no_longer_one_is_promised(
    windows, num_blocks, max_step_tokens
):
    kv = create_manager(windows, num_blocks, max_step_tokens=max_step_tokens, max_model_len=100)
    longest = kv.num_usable_tokens
    assert longest == max(
        (
            length
            for length in range(101)
            if sum(needed(window, length, max_step_tokens) for window in windows) < num_blocks
        ),
        default=0,
    )
    if longest:
        kv.free(run(kv, list(range(longest)), max_step_tokens))


def needed(window, length, step):
    """Blocks of four tokens, counted over every step that may be: it begins anywhere."""
    if window is None:
        return -(-length // 4)
    most = max(
        (
            (min(start + step, length) - 1) // 4 - max(start - window + 1, 0) // 4 + 1
            for start in range(length)
        ),
        default=0,
    )
    bound = min(-(-length // 4), -(-(window - 1 + step) // 4) + 1)
    assert most <= bound
    return bound
