"""The kernels of sampling that read the whole vocabulary, several programs a row.

find_largest_kernel   the best logit of each chunk
weigh_kernel          twice: weights up to the pivots of rows with top-k or top-p
split_kernel          tokens that surely stay compete; those in the interval are listed
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.kernels.gpu.sampling_noise import NO_TOKEN, best_noisy, stream_key
from tokenmill.kernels.gpu.sampling_state import (
    BELOW,
    HI,
    LARGEST,
    LO,
    NOISY,
    NUM_LISTED,
    NUM_PIVOTS,
    PIVOTS,
    SMALLEST,
    STATE_SIZE,
    SUMS,
    TARGET,
    UPTO,
    WORST_RANK,
    best_of_chunks,
    counts_tokens,
    interval_after_first_pass,
    is_finite,
    mass_of,
    rank_of,
    scale_logits,
    scaled_of,
    tighten_by_pass,
    worst_rank,
)


@triton.jit
def find_largest_kernel(
    logits: tl.tensor,
    chunk_values: tl.tensor,
    chunk_ids: tl.tensor,
    state: tl.tensor,
    logits_stride: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    FILTERS: tl.constexpr,
) -> None:
    """Grid (chunks, rows). A NaN counts as infinite, so that its row is not valid."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = ids < VOCAB_SIZE
    x = tl.load(logits + row * logits_stride + ids, mask=mask, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    largest = tl.max(x, axis=0)
    values = chunk_values + row * 3 * MAX_CHUNKS + chunk
    tl.store(values + LARGEST * MAX_CHUNKS, largest)
    best_id = tl.min(tl.where(mask & (x == largest), ids, NO_TOKEN), axis=0)
    tl.store(chunk_ids + row * 2 * MAX_CHUNKS + LARGEST * MAX_CHUNKS + chunk, best_id)
    if FILTERS:
        smallest = tl.min(tl.where(x > float("-inf"), x, float("inf")), axis=0)
        tl.store(values + SMALLEST * MAX_CHUNKS, smallest)
        if chunk == 0:
            place = tl.arange(0, 64)
            is_counter = (place < SUMS + 2 * NUM_PIVOTS) | (place == NUM_LISTED)
            zeros = tl.zeros((64,), tl.int64)
            tl.store(state + row * STATE_SIZE + place, zeros, mask=is_counter)


@triton.jit
def _first_pivot(
    i: tl.constexpr,
    best: tl.tensor,
    smallest: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
) -> tl.tensor:
    """The rank of a logit some way below the best: 1, 3, 6, 10, 15, 21, 28 of 36 parts.

    The parts are those of the row's range of logits, but none is larger than 1: tokens further down
    hardly matter at any temperature. The last pivot is the worst rank of all.
    """
    worst = worst_rank(min_p)
    if i == NUM_PIVOTS - 1:
        pivot = worst
    else:
        part = tl.minimum((best - smallest) / 36.0, 1.0)
        pivot = tl.minimum(rank_of(part * ((i + 1) * (i + 2) / 2) / temperature), worst)
    return pivot


@triton.jit
def _second_pivot(i: tl.constexpr, lo: tl.tensor, hi: tl.tensor) -> tl.tensor:
    """The interval in nine parts: of equal length as numbers, or as ranks where it is wide."""
    start = -scaled_of(tl.maximum(lo, 0))
    end = -scaled_of(hi)
    by_number = rank_of(start + (end - start) * ((i + 1) / 9)).to(tl.int64)
    by_rank = lo + (hi - lo) * (i + 1) // 9
    is_wide = (start > 0.0) & (end > 4.0 * start)
    return tl.minimum(tl.maximum(tl.where(is_wide, by_rank, by_number), lo), hi)


@triton.jit(do_not_specialize_on_alignment=["is_greedy", "temperature", "min_p", "top_k", "top_p"])
def weigh_kernel(
    logits: tl.tensor,
    is_greedy: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    chunk_values: tl.tensor,
    chunk_ids: tl.tensor,
    state: tl.tensor,
    logits_stride: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    PASS: tl.constexpr,
) -> None:
    """Grid (chunks, rows). Add a chunk's weights up to each pivot to the row's sums."""
    row = tl.program_id(1).to(tl.int64)
    k = tl.load(top_k + row)
    counts = counts_tokens(k, VOCAB_SIZE)
    if (tl.load(is_greedy + row) == 0) & (counts | (tl.load(top_p + row) < 1.0)):
        values = chunk_values + row * 3 * MAX_CHUNKS
        ids = chunk_ids + row * 2 * MAX_CHUNKS
        best, _ = best_of_chunks(values, ids, NUM_CHUNKS, MAX_CHUNKS)
        if is_finite(best):
            _weigh(
                logits + row * logits_stride,
                values,
                state + row * STATE_SIZE,
                best,
                tl.load(temperature + row),
                tl.load(min_p + row),
                k,
                tl.load(top_p + row),
                VOCAB_SIZE,
                NUM_CHUNKS,
                CHUNK,
                MAX_CHUNKS,
                PASS,
            )


@triton.jit
def _weigh(
    logits: tl.tensor,
    values: tl.tensor,
    state: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    PASS: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + ids, mask=ids < VOCAB_SIZE, other=float("-inf"))
    scaled = scale_logits(x, best, temperature)
    rank = rank_of(scaled)
    weight = tl.full((CHUNK,), 1, tl.int64)
    if not counts_tokens(top_k, VOCAB_SIZE):
        weight = mass_of(scaled)
    if PASS == 0:
        places = tl.arange(0, MAX_CHUNKS)
        lows = tl.load(
            values + SMALLEST * MAX_CHUNKS + places, mask=places < NUM_CHUNKS, other=float("inf")
        )
        smallest = tl.min(lows, axis=0)
    else:
        target, lo, hi, _, _ = interval_after_first_pass(state, top_k, top_p, VOCAB_SIZE)
        if chunk == 0:
            tl.store(state + TARGET, target)
    for i in tl.static_range(NUM_PIVOTS):
        if PASS == 0:
            pivot = _first_pivot(i, best, smallest, temperature, min_p).to(tl.int64)
        else:
            pivot = _second_pivot(i, lo, hi)
        total = tl.sum(tl.where(rank <= pivot.to(tl.int32), weight, 0), axis=0)
        tl.atomic_add(state + SUMS + PASS * NUM_PIVOTS + i, total, sem="relaxed")
        # Later kernels read the pivots rather than compute them again, perhaps a bit differently.
        if chunk == 0:
            tl.store(state + PIVOTS + PASS * NUM_PIVOTS + i, pivot)


@triton.jit(
    do_not_specialize_on_alignment=[
        "is_greedy",
        "temperature",
        "min_p",
        "top_k",
        "top_p",
        "seed",
        "position",
    ]
)
def split_kernel(
    logits: tl.tensor,
    is_greedy: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    chunk_values: tl.tensor,
    chunk_ids: tl.tensor,
    state: tl.tensor,
    listed: tl.tensor,
    logits_stride: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    MAX_LISTED: tl.constexpr,
    FILTERS: tl.constexpr,
) -> None:
    """Grid (chunks, rows). Of random rows, each chunk's best noisy token among those that stay."""
    row = tl.program_id(1).to(tl.int64)
    values = chunk_values + row * 3 * MAX_CHUNKS
    ids = chunk_ids + row * 2 * MAX_CHUNKS
    best, _ = best_of_chunks(values, ids, NUM_CHUNKS, MAX_CHUNKS)
    if (tl.load(is_greedy + row) == 0) & is_finite(best):
        lo = tl.full((), WORST_RANK, tl.int64)
        hi = lo
        if FILTERS:
            lo, hi = _interval(
                state + row * STATE_SIZE,
                tl.load(min_p + row),
                tl.load(top_k + row),
                tl.load(top_p + row),
                VOCAB_SIZE,
            )
        value, token = _split(
            logits + row * logits_stride,
            best,
            tl.load(temperature + row),
            stream_key(tl.load(seed + row), tl.load(position + row)),
            lo.to(tl.int32),
            hi.to(tl.int32),
            state + row * STATE_SIZE,
            listed + row * 2 * MAX_LISTED,
            VOCAB_SIZE,
            CHUNK,
            TILE,
            MAX_LISTED,
        )
        chunk = tl.program_id(0)
        tl.store(values + NOISY * MAX_CHUNKS + chunk, value)
        tl.store(ids + NOISY * MAX_CHUNKS + chunk, token)


@triton.jit
def _interval(
    state: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(lo, hi): tokens up to rank lo surely stay; those behind it, up to hi, may.

    With both top-k and top-p, no token surely stays before top-k has ended.
    """
    counts = counts_tokens(top_k, VOCAB_SIZE)
    lo = worst_rank(min_p).to(tl.int64)
    hi = lo
    if counts | (top_p < 1.0):
        target, lo, hi, below, upto = interval_after_first_pass(state, top_k, top_p, VOCAB_SIZE)
        lo, hi, below, upto = tighten_by_pass(state, 1, target, lo, hi, below, upto)
        needs_all = counts & (top_p < 1.0)
        lo = tl.where(needs_all, -1, lo)
        if tl.program_id(0) == 0:
            tl.store(state + LO, lo)
            tl.store(state + HI, hi)
            tl.store(state + BELOW, tl.where(needs_all, 0, below))
            tl.store(state + UPTO, upto)
    return lo, hi


@triton.jit
def _split(
    logits: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    key: tl.tensor,
    lo: tl.tensor,
    hi: tl.tensor,
    state: tl.tensor,
    listed: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    MAX_LISTED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(value, token) of the chunk's best noisy token up to rank lo; list those in (lo, hi]."""
    value = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), NO_TOKEN, tl.int32)
    for start in range(0, CHUNK, TILE):
        ids = tl.program_id(0) * CHUNK + start + tl.arange(0, TILE)
        x = tl.load(logits + ids, mask=ids < VOCAB_SIZE, other=float("-inf"))
        scaled = scale_logits(x, best, temperature)
        rank = rank_of(scaled)
        if lo >= 0:
            value, token = best_noisy(scaled, ids, rank <= lo, key, value, token)
        is_open = ((rank > lo) & (rank <= hi)).to(tl.int32)
        num_open = tl.sum(is_open, axis=0)
        if num_open > 0:
            first = tl.atomic_add(state + NUM_LISTED, num_open.to(tl.int64), sem="relaxed")
            place = first + tl.cumsum(is_open, axis=0) - 1
            fits = (is_open != 0) & (place < MAX_LISTED)
            tl.store(listed + place, rank, mask=fits)
            tl.store(listed + MAX_LISTED + place, ids, mask=fits)
    return value, token
