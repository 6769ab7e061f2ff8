"""The last kernel of sampling: one program a row ends the searches and names the token."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.kernels.gpu.sampling_noise import NO_TOKEN, best_noisy, stream_key
from tokenmill.kernels.gpu.sampling_state import (
    BANNED_RANK,
    BELOW,
    HI,
    LO,
    NOISY,
    NUM_LISTED,
    STATE_SIZE,
    TARGET,
    UPTO,
    best_of_chunks,
    counts_tokens,
    is_finite,
    mass_of,
    mass_target,
    rank_of,
    scale_logits,
    scaled_of,
    tighten,
)

# What a search weighs.
_TOKENS = tl.constexpr(0)
_MASSES = tl.constexpr(1)
_TIES = tl.constexpr(2)  # tokens of one rank, by their ids instead of ranks


@triton.jit(
    do_not_specialize_on_alignment=[
        "is_greedy",
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "position",
        "token_ids",
        "is_valid",
    ]
)
def choose_kernel(
    logits: tl.tensor,
    is_greedy: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    chunk_values: tl.tensor,
    chunk_ids: tl.tensor,
    state: tl.tensor,
    listed: tl.tensor,
    token_ids: tl.tensor,
    is_valid: tl.tensor,
    logits_stride: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    MAX_LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    RANDOM: tl.constexpr,
    FILTERS: tl.constexpr,
) -> None:
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    values = chunk_values + row * 3 * MAX_CHUNKS
    ids = chunk_ids + row * 2 * MAX_CHUNKS
    best, token = best_of_chunks(values, ids, NUM_CHUNKS, MAX_CHUNKS)
    tl.store(is_valid + row, is_finite(best))
    if RANDOM:  # noqa: SIM102  decided when the kernel is compiled, the other one when it runs
        if (tl.load(is_greedy + row) == 0) & is_finite(best):
            value, token = best_of_chunks(
                values + NOISY * MAX_CHUNKS, ids + NOISY * MAX_CHUNKS, NUM_CHUNKS, MAX_CHUNKS
            )
            if FILTERS:
                k = tl.load(top_k + row)
                p = tl.load(top_p + row)
                if counts_tokens(k, VOCAB_SIZE) | (p < 1.0):
                    token = _best_of_listed(
                        logits + row * logits_stride,
                        listed + row * 2 * MAX_LISTED,
                        state + row * STATE_SIZE,
                        best,
                        tl.load(temperature + row),
                        k,
                        p,
                        stream_key(tl.load(seed + row), tl.load(position + row)),
                        value,
                        token,
                        VOCAB_SIZE,
                        MAX_LISTED,
                        BLOCK,
                    )
    tl.store(token_ids + row, token.to(token_ids.dtype.element_ty))


@triton.jit
def _best_of_listed(
    logits: tl.tensor,
    listed: tl.tensor,
    state: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    token: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    MAX_LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The best noisy token, given (value, token) of those that surely stay."""
    # A list that has overflowed holds only some of the tokens: they are read from the logits.
    num_listed = tl.load(state + NUM_LISTED)
    is_complete = num_listed <= MAX_LISTED
    num_open = tl.where(is_complete, num_listed, VOCAB_SIZE).to(tl.int32)
    lo = tl.load(state + LO).to(tl.int32)
    last, last_id = _last_kept(
        logits,
        listed,
        is_complete,
        num_open,
        best,
        temperature,
        top_k,
        top_p,
        lo,
        tl.load(state + HI).to(tl.int32),
        tl.load(state + BELOW),
        tl.load(state + UPTO),
        tl.load(state + TARGET),
        VOCAB_SIZE,
        MAX_LISTED,
        BLOCK,
    )
    for start in range(0, num_open, BLOCK):
        rank, ids = _load_open(
            logits, listed, is_complete, num_open, best, temperature, start, MAX_LISTED, BLOCK
        )
        stays = (rank > lo) & ((rank < last) | ((rank == last) & (ids <= last_id)))
        value, token = best_noisy(scaled_of(rank), ids, stays, key, value, token)
    return token


@triton.jit
def _last_kept(
    logits: tl.tensor,
    listed: tl.tensor,
    is_complete: tl.tensor,
    num_open: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    lo: tl.tensor,
    hi: tl.tensor,
    below: tl.tensor,
    upto: tl.tensor,
    target: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    MAX_LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(rank, id) of the last token that top-k and top-p keep, in falling order."""
    source = (logits, listed, is_complete, num_open, best, temperature)
    last_id = tl.full((), VOCAB_SIZE, tl.int32)
    if counts_tokens(top_k, VOCAB_SIZE):
        hi, _, _ = _search(source, lo, hi, below, upto, target, 0, _TOKENS, MAX_LISTED, BLOCK)
        if top_p < 1.0:  # nothing surely stays: what is listed is all that top-k has left
            upto, _, _, _ = _weigh_open(source, lo, hi, hi, hi, hi, 0, _MASSES, MAX_LISTED, BLOCK)
            target = mass_target(upto, top_p)
    if top_p < 1.0:
        hi, below, upto = _search(
            source, lo, hi, below, upto, target, 0, _MASSES, MAX_LISTED, BLOCK
        )
        mass = tl.maximum(mass_of(scaled_of(hi)), 1)
        num_kept = (target - below + mass - 1) // mass
        num_ties = (upto - below) // mass
        if num_kept < num_ties:
            last_id, _, _ = _search(
                source,
                last_id * 0 - 1,
                last_id - 1,
                below * 0,
                num_ties,
                num_kept,
                hi,
                _TIES,
                MAX_LISTED,
                BLOCK,
            )
    return hi, last_id


@triton.jit
def _search(
    source: tl.tuple,
    lo: tl.tensor,
    hi: tl.tensor,
    below: tl.tensor,
    upto: tl.tensor,
    target: tl.tensor,
    tied_rank: tl.tensor,
    WEIGHT: tl.constexpr,
    MAX_LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(hi, below, upto) when (lo, hi] holds one number; each pass cuts it into five."""
    first = lo
    base = below
    while hi - lo > 1:
        step = tl.maximum((hi - lo) // 5, 1)
        pivot_1 = lo + step
        pivot_2 = tl.minimum(lo + 2 * step, hi - 1)
        pivot_3 = tl.minimum(lo + 3 * step, hi - 1)
        pivot_4 = tl.minimum(lo + 4 * step, hi - 1)
        weight_1, weight_2, weight_3, weight_4 = _weigh_open(
            source,
            first,
            pivot_1,
            pivot_2,
            pivot_3,
            pivot_4,
            tied_rank,
            WEIGHT,
            MAX_LISTED,
            BLOCK,
        )
        lo, hi, below, upto = tighten(pivot_1, base + weight_1, target, lo, hi, below, upto)
        lo, hi, below, upto = tighten(pivot_2, base + weight_2, target, lo, hi, below, upto)
        lo, hi, below, upto = tighten(pivot_3, base + weight_3, target, lo, hi, below, upto)
        lo, hi, below, upto = tighten(pivot_4, base + weight_4, target, lo, hi, below, upto)
    return hi, below, upto


@triton.jit
def _weigh_open(
    source: tl.tuple,
    first: tl.tensor,
    pivot_1: tl.tensor,
    pivot_2: tl.tensor,
    pivot_3: tl.tensor,
    pivot_4: tl.tensor,
    tied_rank: tl.tensor,
    WEIGHT: tl.constexpr,
    MAX_LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Weights of the open tokens behind `first`, up to each pivot."""
    logits, listed, is_complete, num_open, best, temperature = source
    sum_1 = tl.zeros((BLOCK,), tl.int64)
    sum_2 = sum_1
    sum_3 = sum_1
    sum_4 = sum_1
    for start in range(0, num_open, BLOCK):
        number, ids = _load_open(
            logits, listed, is_complete, num_open, best, temperature, start, MAX_LISTED, BLOCK
        )
        weight = tl.full((BLOCK,), 1, tl.int64)
        if WEIGHT == _MASSES:
            weight = mass_of(scaled_of(number))
        if WEIGHT == _TIES:
            weight = tl.where(number == tied_rank, weight, 0)
            number = ids
        weight = tl.where(number > first, weight, 0)
        sum_1 += tl.where(number <= pivot_1, weight, 0)
        sum_2 += tl.where(number <= pivot_2, weight, 0)
        sum_3 += tl.where(number <= pivot_3, weight, 0)
        sum_4 += tl.where(number <= pivot_4, weight, 0)
    return tl.sum(sum_1), tl.sum(sum_2), tl.sum(sum_3), tl.sum(sum_4)


@triton.jit
def _load_open(
    logits: tl.tensor,
    listed: tl.tensor,
    is_complete: tl.tensor,
    num_open: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    start: tl.tensor,
    MAX_LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(ranks, ids) of a block of the list, or of the logits."""
    place = start + tl.arange(0, BLOCK)
    mask = place < num_open
    if is_complete:
        rank = tl.load(listed + place, mask=mask, other=BANNED_RANK)
        ids = tl.load(listed + MAX_LISTED + place, mask=mask, other=NO_TOKEN)
    else:
        x = tl.load(logits + place, mask=mask, other=float("-inf"))
        rank = rank_of(scale_logits(x, best, temperature))
        ids = place
    return rank, ids
