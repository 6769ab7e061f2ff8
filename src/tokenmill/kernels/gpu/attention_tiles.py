"""What the attention kernels share: tiles of queries that walk over tiles of keys.

A tile of queries has `block_m` rows. All query heads of a KV head lie in one tile, so that the keys
are read once for them:

    row        0      1      2      3      4      5    ...     (group = 3)
    token      t      t      t      t + 1  t + 1  t + 1
    head       3h     3h+1   3h+2   3h     3h+1   3h+2

Keys are walked in tiles of `block_n`, always from multiples of it on, so that a row's sums have the
same order whatever else is in the batch. The state of a row is (acc, peak, total): the weighted sum
of values, the largest score, and the sum of weights 2 ** (score - peak). Scores are in units of
log2(e), since the hardware has an exponential to base 2.

In partitions, the state starts anew at each multiple of `partition` keys, and the states are merged
in order. Whether that happens in registers or through memory makes no difference to the bits: the
products and sums are written as explicit fused operations.

Of latents, of which there is one for all heads, a value is the part of its key behind the part that
is rotated, so that a tile of keys is a tile of values, too:

    key      | rotated | head_size: the value |

Tiles have as many heads as have room, and walk over the same keys as if each had a KV head.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
_REQUESTS_AT_ONCE = tl.constexpr(128)
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def find_request(starts: tl.tensor, item: tl.tensor, num_reqs: tl.tensor) -> Any:
    """The request of an item: the last whose first item is not behind it.

    starts is int32 [num_reqs + 1]; the item is one of starts[num_reqs].
    """
    # All of them at once: a bisection's loads would wait for each other.
    found = num_reqs * 0
    for first in range(0, num_reqs, _REQUESTS_AT_ONCE):
        places = first + tl.arange(0, _REQUESTS_AT_ONCE)
        begins = tl.load(starts + places, mask=places < num_reqs, other=2147483647)
        found += tl.sum((begins <= item).to(tl.int32), 0)
    return found - 1


@triton.jit
def load_query(
    query: tl.tensor,
    query_stride: tl.tensor,
    first_token: tl.tensor,
    num_tokens: tl.tensor,
    kv_head: tl.tensor,
    S: tl.constexpr,
) -> Any:
    """Rows of a tile whose request has num_tokens tokens from first_token on, [block_m, block_d],
    and their rotated parts, [block_m, block_r], where these are apart.

    Rows without a token, and elements behind the head size, are zero.
    """
    rows = tl.arange(0, S.block_m)
    offsets = row_offsets(rows, first_token, query_stride, kv_head, S.key_size, S)
    is_row = rows < num_tokens * S.group
    q = _load_rows(query + S.rotated + offsets, is_row, S.head_size, S.block_d)
    if S.rotated > 0:
        return q, _load_rows(query + offsets, is_row, S.rotated, S.block_r)
    else:  # noqa: RET505  a compiled function's returns must exclude each other
        return q, q


@triton.jit
def _load_rows(
    rows: tl.tensor, is_row: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """SIZE elements from each of these pointers, zero behind them and where there is no row."""
    dims = tl.arange(0, BLOCK)
    mask = is_row[:, None]
    if BLOCK != SIZE:
        mask &= (dims < SIZE)[None, :]
    return tl.load(rows[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def store_output(
    out: tl.tensor,
    out_stride: tl.tensor,
    values: tl.tensor,
    rows: tl.tensor,
    first_token: tl.tensor,
    num_tokens: tl.tensor,
    kv_head: tl.tensor,
    S: tl.constexpr,
) -> None:
    """Store values [len(rows), block_d] of a request's rows, in the order of `load_query`."""
    dims = tl.arange(0, S.block_d)
    offsets = row_offsets(rows, first_token, out_stride, kv_head, S.head_size, S)
    mask = (rows < num_tokens * S.group)[:, None]
    if S.block_d != S.head_size:
        mask &= (dims < S.head_size)[None, :]
    values = values.to(out.dtype.element_ty)
    tl.store(out + offsets[:, None] + dims[None, :], values, mask=mask)


@triton.jit
def row_offsets(
    rows: tl.tensor,
    first_token: tl.tensor,
    stride: tl.tensor,
    kv_head: tl.tensor,
    SIZE: tl.constexpr,
    S: tl.constexpr,
) -> Any:
    """Where a tile's rows begin in a [num_tokens, num_heads * SIZE] tensor."""
    tokens = (first_token + rows // S.group).to(tl.int64)
    return tokens * stride + (kv_head * S.group + rows % S.group) * SIZE


@triton.jit
def load_blocks(
    table: tl.tensor, key0: tl.tensor, seq_len: tl.tensor, S: tl.constexpr
) -> tl.tensor:
    """The cache blocks of a tile: one, or one for each key; 0 behind the sequence.

    They are loaded a tile ahead of the keys: loaded with them they would take stages of the
    pipeline, and the keys would come late.
    """
    if S.block_size % S.block_n == 0:
        return tl.load(table + key0 // S.block_size, mask=key0 < seq_len, other=0)
    else:  # noqa: RET505  a compiled function's returns must exclude each other
        positions = key0 + tl.arange(0, S.block_n)
        return tl.load(table + positions // S.block_size, mask=positions < seq_len, other=0)


@triton.jit
def _tile_pointers(
    keys: tl.tensor, blocks: tl.tensor, key0: tl.tensor, BLOCK_D: tl.constexpr, S: tl.constexpr
) -> Any:
    """Pointers [block_n, BLOCK_D] to the keys of a tile; keys points to the head in block 0."""
    lanes = tl.arange(0, S.block_n)
    dims = tl.arange(0, BLOCK_D)
    if S.block_size % S.block_n == 0:
        first = blocks.to(tl.int64) * S.block_stride + (key0 % S.block_size) * S.token_stride
        return keys + first + (lanes * S.token_stride)[:, None] + dims[None, :]
    else:  # noqa: RET505  as above
        rows = blocks.to(tl.int64) * S.block_stride
        rows += ((key0 + lanes) % S.block_size) * S.token_stride
        return keys + rows[:, None] + dims[None, :]


@triton.jit
def _load_tile(
    pointers: tl.tensor,
    key0: tl.tensor,
    seq_len: tl.tensor,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
    S: tl.constexpr,
) -> Any:
    """SIZE elements of keys or values of a tile, zero behind the sequence: what lies there may be
    NaN.
    """
    BLOCK_D: tl.constexpr = pointers.shape[1]
    is_dim = (tl.arange(0, BLOCK_D) < SIZE)[None, :]
    is_key = (key0 + tl.arange(0, S.block_n) < seq_len)[:, None]
    if MASKED and BLOCK_D != SIZE:
        return tl.load(pointers, mask=is_key & is_dim, other=0.0)
    elif MASKED:  # noqa: RET505  as above
        return tl.load(pointers, mask=is_key, other=0.0)
    elif BLOCK_D != SIZE:
        return tl.load(pointers, mask=is_dim, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _multiply(a: tl.tensor, b: tl.tensor, acc: tl.tensor) -> Any:
    """Add a @ b to the float32 acc."""
    if IS_INTERPRETED:  # The interpreter multiplies the bits of bfloat16 as integers.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:  # noqa: RET505  as above
        # Float32 as three products of its parts; it has no matrix instruction of its own.
        return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def _hide(
    scores: tl.tensor,
    key0: tl.tensor,
    positions: tl.tensor,
    seq_len: tl.tensor,
    S: tl.constexpr,
) -> Any:
    """Scores of a tile, -inf where a row's position does not see the key."""
    keys = (key0 + tl.arange(0, S.block_n))[None, :]
    visible = keys <= positions[:, None] if S.causal else keys < seq_len
    if S.window > 0:
        visible &= keys > positions[:, None] - S.window
    return tl.where(visible, scores, -float("inf"))


@triton.jit
def fold_tile(
    q: tl.tensor,
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    key0: tl.tensor,
    blocks: tl.tensor,
    sequence: tl.tuple,
    MASKED: tl.constexpr,
    S: tl.constexpr,
) -> Any:
    """Add one tile of keys, from key0 on and in these blocks, to the state of a tile of queries."""
    keys, _, positions, seq_len, qk_scale, soft_cap, q_rotated = sequence
    block_m: tl.constexpr = S.block_m
    block_n: tl.constexpr = S.block_n
    pointers = _tile_pointers(keys + S.rotated, blocks, key0, S.block_d, S)
    key = _load_tile(pointers, key0, seq_len, MASKED, S.head_size, S).to(q.dtype)
    scores = _multiply(q, tl.trans(key), tl.zeros([block_m, block_n], tl.float32))
    if S.rotated > 0:
        rotated = _tile_pointers(keys, blocks, key0, S.block_r, S)
        rotated = _load_tile(rotated, key0, seq_len, MASKED, S.rotated, S).to(q.dtype)
        scores = _multiply(q_rotated, tl.trans(rotated), scores)
    if S.has_soft_cap:
        # cap * tanh(x / cap): qk_scale holds 2 * log2(e) / cap too, and soft_cap is cap * log2(e)
        scores = soft_cap - (2.0 * soft_cap) / (tl.exp2(scores * qk_scale) + 1.0)
    if MASKED:
        scores = _hide(scores, key0, positions, seq_len, S)
    highest = tl.max(scores, 1)
    if not S.has_soft_cap:
        highest *= qk_scale
    top = tl.maximum(peak, highest)
    base = top
    if MASKED:
        base = tl.where(top == -float("inf"), 0.0, top)
    if S.has_soft_cap:
        weights = tl.exp2(scores - base[:, None])
    else:
        scales = tl.full(scores.shape, 1.0, tl.float32) * qk_scale
        weights = tl.exp2(tl.fma(scores, scales, tl.broadcast_to(-base[:, None], scores.shape)))
    rescale = tl.exp2(peak - base)
    total = tl.fma(total, rescale, tl.sum(weights, 1))
    acc = acc * rescale[:, None]
    value = key
    if S.rotated == 0:
        value = _load_tile(pointers + S.value_offset, key0, seq_len, MASKED, S.head_size, S)
        value = value.to(q.dtype)
    return _multiply(weights.to(q.dtype), value, acc), top, total


@triton.jit
def empty_state(ROWS: tl.constexpr, S: tl.constexpr) -> Any:
    """The state of rows that have seen no key."""
    block_d: tl.constexpr = S.block_d
    acc = tl.zeros([ROWS, block_d], tl.float32)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    return acc, peak, total


@triton.jit
def merge_states(merged: tl.tuple, state: tl.tuple) -> Any:
    """The state of rows after the keys of both; one without keys leaves the other's bits."""
    acc, peak, total = merged
    next_acc, next_peak, next_total = state
    top = tl.maximum(peak, next_peak)
    base = tl.where(top == -float("inf"), 0.0, top)
    weight = tl.exp2(peak - base)
    next_weight = tl.exp2(next_peak - base)
    next_weights = tl.broadcast_to(next_weight[:, None], next_acc.shape)
    acc = tl.fma(next_acc, next_weights, acc * weight[:, None])
    return acc, top, tl.fma(next_total, next_weight, total * weight)


@triton.jit
def normalize(
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    sinks: tl.tensor,
    rows: tl.tensor,
    kv_head: tl.tensor,
    v_scale: tl.tensor,
    S: tl.constexpr,
) -> Any:
    """Outputs of rows: a head's sink takes part in the sum of weights, without a value."""
    if S.has_sinks:
        sink = tl.load(sinks + kv_head * S.group + rows % S.group).to(tl.float32) * LOG2_E
        top = tl.maximum(peak, sink)
        weight = tl.exp2(peak - top)
        acc = acc * weight[:, None]
        total = tl.fma(total, weight, tl.exp2(sink - top))
    # A row of a tile that holds no token has seen nothing.
    return acc * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit
def walk(
    q: tl.tensor,
    state: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    sequence: tl.tuple,
    MASKED: tl.constexpr,
    S: tl.constexpr,
) -> Any:
    """Add the keys from begin, a multiple of block_n, up to end to the state of a tile.

    The sequence is (pointer to the keys of a KV head in block 0, pointer to the request's block
    table, position of each row, seq_len, scale of scores, soft cap, rotated parts of the queries).
    Without MASKED, all rows see all of these keys.
    """
    acc, peak, total = state
    table, seq_len = sequence[1], sequence[3]
    blocks = load_blocks(table, begin, seq_len, S)
    for key0 in range(begin, end, S.block_n):
        next_blocks = load_blocks(table, key0 + S.block_n, seq_len, S)
        acc, peak, total = fold_tile(q, acc, peak, total, key0, blocks, sequence, MASKED, S)
        blocks = next_blocks
    return acc, peak, total


@triton.jit
def walk_partitions(
    q: tl.tensor,
    merged: tl.tuple,
    state: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    sequence: tl.tuple,
    MASKED: tl.constexpr,
    S: tl.constexpr,
) -> Any:
    """`walk` whose state, where a partition begins, is merged and starts anew: (merged, state)."""
    block_m: tl.constexpr = S.block_m
    acc, peak, total = merged
    part, part_peak, part_total = state
    table, seq_len = sequence[1], sequence[3]
    blocks = load_blocks(table, begin, seq_len, S)
    for key0 in range(begin, end, S.block_n):
        # Here, not behind the product: there the compiler would read it before it is complete.
        if key0 % S.partition == 0:
            acc, peak, total = merge_states((acc, peak, total), (part, part_peak, part_total))
            # With its peak the next tile scales the old sum by 0.
            part_peak = tl.full([block_m], -float("inf"), tl.float32)
            part_total = tl.zeros([block_m], tl.float32)
        next_blocks = load_blocks(table, key0 + S.block_n, seq_len, S)
        part, part_peak, part_total = fold_tile(
            q, part, part_peak, part_total, key0, blocks, sequence, MASKED, S
        )
        blocks = next_blocks
    return (acc, peak, total), (part, part_peak, part_total)
