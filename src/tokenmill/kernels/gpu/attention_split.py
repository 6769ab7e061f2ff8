"""Attention of the requests that compute few tokens: their keys are split among programs.

plan    one program      counts the work of a step, so that others find theirs
split   as many as fill  each walks over neighbouring items of a KV head: an item is a partition of
        the device       a request's keys, or all of them where the workspace has no room for parts
merge   one per request  merges the partitions of a request in order
        and KV head

Plan, int32 [3, at least num_reqs + 1], each row the running sum of

    items       partitions that become an item, of requests of at most `tile_tokens` tokens
    rows        rows of partial results in the workspace
    tiles       tiles of queries of longer requests (`attention_prefill.py`)

Workspace, float32: outputs [capacity, num_kv_heads, head_size], then (peak, total)
[capacity, num_kv_heads, 2]; a request's rows are [partitions, tokens * group].
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tokenmill.kernels.gpu.attention_tiles import (
    empty_state,
    find_request,
    fold_tile,
    load_blocks,
    load_query,
    merge_states,
    normalize,
    store_output,
    walk,
)
from tokenmill.kernels.gpu.overlap import let_next_start, wait_for_previous

PLAN_ROWS = 3


@triton.jit
def _partitions(
    seq_len: tl.tensor, query_len: tl.tensor, WINDOW: tl.constexpr, PARTITION: tl.constexpr
) -> Any:
    """(first partition that a request's tokens see, number of partitions)."""
    first = seq_len * 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - query_len - WINDOW + 1, 0) // PARTITION
    return first, tl.cdiv(seq_len, PARTITION) - first


_TABLES = ["block_table", "seq_lens", "query_start_loc"]
"""Pointers into buffers, at any place: a variant for each would be compiled while a step waits."""


@triton.jit(
    do_not_specialize=["num_reqs", "plan_stride", "capacity"],
    do_not_specialize_on_alignment=_TABLES,
)
def plan_kernel(
    seq_lens: tl.tensor,
    query_start_loc: tl.tensor,
    plan: tl.tensor,
    num_reqs: tl.tensor,
    plan_stride: tl.tensor,
    capacity: tl.tensor,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    PARTITION: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    PREFILL_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (1,). The tokens are those of a tile of queries of each kernel."""
    num_items = 0
    num_rows = 0
    num_tiles = 0
    for first_req in range(0, num_reqs, BLOCK):
        reqs = first_req + tl.arange(0, BLOCK)
        mask = reqs < num_reqs
        start = tl.load(query_start_loc + reqs, mask=mask, other=0)
        query_len = tl.load(query_start_loc + reqs + 1, mask=mask, other=0) - start
        seq_len = tl.load(seq_lens + reqs, mask=mask, other=0)
        is_split = (query_len > 0) & (query_len <= SPLIT_TOKENS)
        _, num_partitions = _partitions(seq_len, query_len, WINDOW, PARTITION)
        num_partitions = tl.where(is_split, num_partitions, 0)
        rows = tl.where(num_partitions > 1, num_partitions * query_len * GROUP, 0)
        row_end = num_rows + tl.cumsum(rows, 0)
        items = tl.where(row_end <= capacity, num_partitions, tl.minimum(num_partitions, 1))
        tiles = tl.where(query_len > SPLIT_TOKENS, tl.cdiv(query_len, PREFILL_TOKENS), 0)
        tl.store(plan + reqs, num_items + tl.cumsum(items, 0) - items, mask=mask)
        tl.store(plan + plan_stride + reqs, row_end - rows, mask=mask)
        tile_starts = num_tiles + tl.cumsum(tiles, 0) - tiles
        tl.store(plan + 2 * plan_stride + reqs, tile_starts, mask=mask)
        num_items += tl.sum(items, 0)
        num_rows += tl.sum(rows, 0)
        num_tiles += tl.sum(tiles, 0)
    tl.store(plan + num_reqs, num_items)
    tl.store(plan + plan_stride + num_reqs, num_rows)
    tl.store(plan + 2 * plan_stride + num_reqs, num_tiles)


@triton.jit(
    do_not_specialize=["num_reqs", "table_stride", "plan_stride", "capacity"],
    do_not_specialize_on_alignment=_TABLES,
)
def split_kernel(
    query: tl.tensor,
    kv_cache: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    query_start_loc: tl.tensor,
    plan: tl.tensor,
    workspace: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    num_reqs: tl.tensor,
    query_stride: tl.tensor,
    out_stride: tl.tensor,
    table_stride: tl.tensor,
    plan_stride: tl.tensor,
    capacity: tl.tensor,
    qk_scale: tl.tensor,
    soft_cap: tl.tensor,
    v_scale: tl.tensor,
    S: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Grid (num_kv_heads, any number): programs of a head share its items, in order and evenly."""
    let_next_start(OVERLAPS)
    wait_for_previous(OVERLAPS)
    kv_head = tl.program_id(0)
    num_items = tl.load(plan + num_reqs)
    item = num_items * tl.program_id(1) // tl.num_programs(1)
    last = num_items * (tl.program_id(1) + 1) // tl.num_programs(1)
    while item < last:
        req = find_request(plan, item, num_reqs)
        first_item = tl.load(plan + req)
        next_item = tl.load(plan + req + 1)
        start = tl.load(query_start_loc + req)
        query_len = tl.load(query_start_loc + req + 1) - start
        seq_len = tl.load(seq_lens + req)
        q, rotated = load_query(query, query_stride, start, query_len, kv_head, S)
        positions = seq_len - query_len + tl.arange(0, S.block_m) // S.group
        keys = kv_cache + kv_head * S.key_stride
        table = block_table + req.to(tl.int64) * table_stride
        sequence = (keys, table, positions, seq_len, qk_scale, soft_cap, rotated)
        is_whole = next_item - first_item == 1
        first_row = tl.load(plan + plan_stride + req)
        place = (workspace, capacity, first_row, query_len * S.group, kv_head)
        run = (item - first_item, tl.minimum(next_item, last) - first_item)
        acc, peak, total = _attend_run(q, sequence, query_len, is_whole, run, place, S)
        if is_whole:
            rows = tl.arange(0, S.block_m)
            values = normalize(acc, peak, total, sinks, rows, kv_head, v_scale, S)
            store_output(out, out_stride, values, rows, start, query_len, kv_head, S)
        item = tl.minimum(next_item, last)


@triton.jit
def _attend_run(
    q: tl.tensor,
    sequence: tl.tuple,
    query_len: tl.tensor,
    is_whole: tl.tensor,
    run: tl.tuple,
    place: tl.tuple,
    S: tl.constexpr,
) -> Any:
    """Walk over some items of a request, the run (first, last); of a whole one, the merged state.

    Otherwise the state of each partition goes to its place in the workspace.
    """
    seq_len = sequence[3]
    first, num_partitions = _partitions(seq_len, query_len, S.window, S.partition)
    last = tl.where(is_whole, num_partitions, run[1])
    begin = seq_len * 0
    if S.window > 0:
        begin = tl.maximum(seq_len - query_len - S.window + 1, 0) // S.block_n * S.block_n
    merged = empty_state(S.block_m, S)
    if S.one_loop:
        begin = tl.maximum((first + run[0]) * S.partition, begin)
        end = tl.minimum((first + last) * S.partition, seq_len)
        return _walk_on(q, merged, begin, end, sequence, first, is_whole, place, S)
    else:  # noqa: RET505  a compiled function's returns must exclude each other
        acc, peak, total = merged
        for part in range(run[0], last):
            part_begin = (first + part) * S.partition
            part_end = tl.minimum(part_begin + S.partition, seq_len)
            part_begin = tl.maximum(part_begin, begin)
            state = walk(q, empty_state(S.block_m, S), part_begin, part_end, sequence, True, S)
            acc, peak, total = _leave_partition((acc, peak, total), state, is_whole, part, place, S)
        return acc, peak, total


@triton.jit
def _walk_on(
    q: tl.tensor,
    merged: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    sequence: tl.tuple,
    first: tl.tensor,
    is_whole: tl.tensor,
    place: tl.tuple,
    S: tl.constexpr,
) -> Any:
    """Walk from begin to end in one loop: a partition's keys are on their way while one ends."""
    block_m: tl.constexpr = S.block_m
    acc, peak, total = merged
    part, part_peak, part_total = empty_state(block_m, S)
    table, seq_len = sequence[1], sequence[3]
    blocks = load_blocks(table, begin, seq_len, S)
    for key0 in range(begin, end, S.block_n):
        if (key0 % S.partition == 0) & (key0 != begin):
            number = key0 // S.partition - 1 - first
            state = (part, part_peak, part_total)
            acc, peak, total = _leave_partition(
                (acc, peak, total), state, is_whole, number, place, S
            )
            # With its peak the next tile scales the old sum by 0.
            part_peak = tl.full([block_m], -float("inf"), tl.float32)
            part_total = tl.zeros([block_m], tl.float32)
        next_blocks = load_blocks(table, key0 + S.block_n, seq_len, S)
        part, part_peak, part_total = fold_tile(
            q, part, part_peak, part_total, key0, blocks, sequence, True, S
        )
        blocks = next_blocks
    number = tl.cdiv(end, S.partition) - 1 - first
    state = (part, part_peak, part_total)
    return _leave_partition((acc, peak, total), state, is_whole, number, place, S)


@triton.jit
def _leave_partition(
    merged: tl.tuple,
    state: tl.tuple,
    is_whole: tl.tensor,
    number: tl.tensor,
    place: tl.tuple,
    S: tl.constexpr,
) -> Any:
    """The merged state with that of a partition; of a request in parts it is stored instead."""
    workspace, capacity, first_row, num_rows, kv_head = place
    acc, peak, total = merged
    if is_whole:
        acc, peak, total = merge_states((acc, peak, total), state)
    else:
        rows = tl.arange(0, S.block_m)
        places = (first_row + number * num_rows + rows).to(tl.int64) * S.num_kv_heads + kv_head
        _store_partial(workspace, capacity, places, rows < num_rows, state, S)
    return acc, peak, total


@triton.jit
def _store_partial(
    workspace: tl.tensor,
    capacity: tl.tensor,
    places: tl.tensor,
    mask: tl.tensor,
    state: tl.tuple,
    S: tl.constexpr,
) -> None:
    """Store the state of rows at their places, int64, in [capacity, num_kv_heads]."""
    acc, peak, total = state
    dims = tl.arange(0, S.block_d)
    acc_mask = mask[:, None]
    if S.block_d != S.head_size:
        acc_mask &= (dims < S.head_size)[None, :]
    tl.store(workspace + places[:, None] * S.head_size + dims[None, :], acc, mask=acc_mask)
    sums = workspace + capacity.to(tl.int64) * (S.num_kv_heads * S.head_size) + places * 2
    tl.store(sums, peak, mask=mask)
    tl.store(sums + 1, total, mask=mask)


@triton.jit
def _load_partial(
    workspace: tl.tensor,
    capacity: tl.tensor,
    places: tl.tensor,
    mask: tl.tensor,
    S: tl.constexpr,
) -> Any:
    """What `_store_partial` stored; an empty state where there is nothing."""
    dims = tl.arange(0, S.block_d)
    acc_mask = mask[:, None]
    if S.block_d != S.head_size:
        acc_mask &= (dims < S.head_size)[None, :]
    pointers = workspace + places[:, None] * S.head_size + dims[None, :]
    acc = tl.load(pointers, mask=acc_mask, other=0.0)
    sums = workspace + capacity.to(tl.int64) * (S.num_kv_heads * S.head_size) + places * 2
    peak = tl.load(sums, mask=mask, other=-float("inf"))
    total = tl.load(sums + 1, mask=mask, other=0.0)
    return acc, peak, total


@triton.jit(do_not_specialize=["plan_stride", "capacity"], do_not_specialize_on_alignment=_TABLES)
def merge_kernel(
    query_start_loc: tl.tensor,
    plan: tl.tensor,
    workspace: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    plan_stride: tl.tensor,
    capacity: tl.tensor,
    v_scale: tl.tensor,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    S: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Grid (num_kv_heads, num_reqs, rows of a request / ROWS).

    The loads of UNROLL partitions are under way together.
    """
    let_next_start(OVERLAPS)
    wait_for_previous(OVERLAPS)
    kv_head = tl.program_id(0)
    req = tl.program_id(1)
    num_parts = tl.load(plan + req + 1) - tl.load(plan + req)
    start = tl.load(query_start_loc + req)
    query_len = tl.load(query_start_loc + req + 1) - start
    num_rows = query_len * S.group
    first = tl.program_id(2) * ROWS
    if (num_parts <= 1) | (first >= num_rows):
        return
    rows = first + tl.arange(0, ROWS)
    first_row = tl.load(plan + plan_stride + req)
    state = empty_state(ROWS, S)
    for begin in range(0, num_parts, UNROLL):
        for part in tl.static_range(UNROLL):
            mask = rows < tl.where(begin + part < num_parts, num_rows, 0)
            places = (first_row + (begin + part) * num_rows + rows).to(tl.int64)
            places = places * S.num_kv_heads + kv_head
            state = merge_states(state, _load_partial(workspace, capacity, places, mask, S))
    acc, peak, total = state
    values = normalize(acc, peak, total, sinks, rows, kv_head, v_scale, S)
    store_output(out, out_stride, values, rows, start, query_len, kv_head, S)
