"""Attention of the requests that compute many tokens: one program a tile of queries and KV head."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tokenmill.kernels.gpu.attention_tiles import (
    empty_state,
    find_request,
    load_query,
    merge_states,
    normalize,
    store_output,
    walk,
    walk_partitions,
)
from tokenmill.kernels.gpu.overlap import let_next_start, wait_for_previous


@triton.jit(
    do_not_specialize=["num_reqs", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "query_start_loc", "tile_starts"],
)
def prefill_kernel(
    query: tl.tensor,
    kv_cache: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    query_start_loc: tl.tensor,
    tile_starts: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    num_reqs: tl.tensor,
    query_stride: tl.tensor,
    out_stride: tl.tensor,
    table_stride: tl.tensor,
    qk_scale: tl.tensor,
    soft_cap: tl.tensor,
    v_scale: tl.tensor,
    S: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Grid (num_kv_heads, at least the number of tiles); tile_starts is a row of the plan."""
    let_next_start(OVERLAPS)
    wait_for_previous(OVERLAPS)
    kv_head = tl.program_id(0)
    num_tiles = tl.load(tile_starts + num_reqs)
    if tl.program_id(1) >= num_tiles:
        return
    # A prompt's last tiles have the most keys: they go first, so that the short ones fill the end.
    tile = num_tiles - 1 - tl.program_id(1)
    req = find_request(tile_starts, tile, num_reqs)
    skipped = (tile - tl.load(tile_starts + req)) * S.tile_tokens
    start = tl.load(query_start_loc + req)
    query_len = tl.load(query_start_loc + req + 1) - start
    seq_len = tl.load(seq_lens + req)
    first_token = start + skipped
    num_tokens = tl.minimum(query_len - skipped, S.tile_tokens)
    q, rotated = load_query(query, query_stride, first_token, num_tokens, kv_head, S)
    acc, peak, total = _attend(
        q,
        rotated,
        seq_len - query_len + skipped,
        num_tokens,
        seq_len,
        kv_cache + kv_head * S.key_stride,
        block_table + req.to(tl.int64) * table_stride,
        qk_scale,
        soft_cap,
        S,
    )
    rows = tl.arange(0, S.block_m)
    values = normalize(acc, peak, total, sinks, rows, kv_head, v_scale, S)
    store_output(out, out_stride, values, rows, first_token, num_tokens, kv_head, S)


@triton.jit
def _attend(
    q: tl.tensor,
    rotated: tl.tensor,
    position: tl.tensor,
    num_tokens: tl.tensor,
    seq_len: tl.tensor,
    keys: tl.tensor,
    table: tl.tensor,
    qk_scale: tl.tensor,
    soft_cap: tl.tensor,
    S: tl.constexpr,
) -> Any:
    """State of a tile whose tokens stand at `position` and behind, after all keys that they see.

    Whole tiles of keys that all of them see are walked without a mask:

        begin     full_begin             full_end    end
          | masked |        all visible      | masked |
    """
    positions = position + tl.arange(0, S.block_m) // S.group
    last = position + num_tokens - 1
    begin = position * 0
    full_begin = begin
    end = last + 1 if S.causal else seq_len
    full_end = position + 1 if S.causal else seq_len
    full_end = full_end // S.block_n * S.block_n
    if S.window > 0:
        begin = tl.maximum(position - S.window + 1, 0) // S.block_n * S.block_n
        full_begin = tl.cdiv(tl.maximum(last - S.window + 1, 0), S.block_n) * S.block_n
    sequence = (keys, table, positions, seq_len, qk_scale, soft_cap, rotated)
    empty = empty_state(S.block_m, S)
    rest = tl.maximum(full_begin, full_end)
    masked_end = tl.minimum(full_begin, end)
    if S.in_partitions:
        merged, state = empty, empty
        if S.window > 0:
            merged, state = walk_partitions(q, merged, state, begin, masked_end, sequence, True, S)
        merged, state = walk_partitions(q, merged, state, full_begin, full_end, sequence, False, S)
        merged, state = walk_partitions(q, merged, state, rest, end, sequence, True, S)
        return merge_states(merged, state)
    else:  # noqa: RET505  a compiled function's returns must exclude each other
        state = empty
        if S.window > 0:
            state = walk(q, state, begin, masked_end, sequence, True, S)
        state = walk(q, state, full_begin, full_end, sequence, False, S)
        return walk(q, state, rest, end, sequence, True, S)
