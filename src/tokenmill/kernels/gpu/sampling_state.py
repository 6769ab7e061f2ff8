"""What the sampling kernels share: a row's numbers, the order of its tokens, their weight.

    scaled = (logit - best) / temperature     float32, at most 0
    rank   = bits of |scaled|                 int32; a smaller one is a better token
    mass   = exp(scaled) in units of 2^-43    int64; the best token has 2^43

Ranks order tokens exactly as their scaled logits do (-0 and 0 are one), and sums of masses are
exact whatever their order, so any number of programs may share a row.

A filter is a search for the smallest rank at which the weight of the tokens up to there reaches a
target: top-k counts tokens, top-p adds masses. The search keeps an interval

    below = weight up to lo  <  target  <=  weight up to hi = upto,     the rank is in (lo, hi]

and each pass weighs the tokens up to eight ranks in it, its pivots.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUM_PIVOTS = tl.constexpr(8)

# A row's int64 numbers in the workspace.
SUMS = tl.constexpr(0)  # [2, NUM_PIVOTS]: of both passes, the weight up to each pivot
PIVOTS = tl.constexpr(16)  # [2, NUM_PIVOTS]: ranks, ascending
TARGET = tl.constexpr(32)
LO = tl.constexpr(33)
HI = tl.constexpr(34)
BELOW = tl.constexpr(35)
UPTO = tl.constexpr(36)
NUM_LISTED = tl.constexpr(37)
STATE_SIZE = tl.constexpr(40)

# Arrays of a row's chunks in the workspace: float32 values and int32 ids.
LARGEST = tl.constexpr(0)
NOISY = tl.constexpr(1)
SMALLEST = tl.constexpr(2)

WORST_RANK = tl.constexpr(0x7F7FFFFF)
"""Of the largest finite number."""
BANNED_RANK = tl.constexpr(0x7F800000)
"""Of -inf, which is no candidate."""

# Up to 2^19 tokens of mass 2^43 fit in an int64.
_MASS_UNIT = tl.constexpr(2.0**43)
MAX_VOCAB_SIZE = 1 << 19


@triton.jit
def scale_logits(logits: tl.tensor, best: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """(logits - best) / temperature, each step rounded to float32."""
    return tl.div_rn(logits - best, temperature)


@triton.jit
def rank_of(scaled: tl.tensor) -> tl.tensor:
    """int32 that orders as -scaled does, for float32 of at most 0."""
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def scaled_of(rank: tl.tensor) -> tl.tensor:
    """The float32 number with this rank."""
    return -rank.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(scaled: tl.tensor) -> tl.tensor:
    """int64; the sum rounds to the nearest unit, since the product is exact."""
    return (tl.exp(scaled.to(tl.float64)) * _MASS_UNIT + 0.5).to(tl.int64)


@triton.jit
def best_of_chunks(
    values: tl.tensor, ids: tl.tensor, NUM_CHUNKS: tl.constexpr, MAX_CHUNKS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(largest value, its id, of equal ones the smallest) of a row's chunks."""
    chunk = tl.arange(0, MAX_CHUNKS)
    mask = chunk < NUM_CHUNKS
    found = tl.load(values + chunk, mask=mask, other=float("-inf"))
    value = tl.max(found, axis=0)
    found_ids = tl.load(ids + chunk, mask=mask, other=0x7FFFFFFF)
    return value, tl.min(tl.where(found == value, found_ids, 0x7FFFFFFF), axis=0)


@triton.jit
def is_finite(value: tl.tensor) -> tl.tensor:
    """Of a number that is no NaN."""
    return tl.abs(value) < float("inf")


@triton.jit
def counts_tokens(top_k: tl.tensor, VOCAB_SIZE: tl.constexpr) -> tl.tensor:
    """Whether top-k is on, so that the search starts with it."""
    return (top_k > 0) & (top_k < VOCAB_SIZE)


@triton.jit
def worst_rank(min_p: tl.tensor) -> tl.tensor:
    """The worst rank that min-p leaves: scaled >= log(min_p), the logarithm rounded to float32."""
    is_on = min_p > 0.0
    log_min_p = tl.log(tl.where(is_on, min_p, 1.0).to(tl.float64)).to(tl.float32)
    return tl.where(is_on, rank_of(log_min_p), WORST_RANK)


@triton.jit
def mass_target(total: tl.tensor, top_p: tl.tensor) -> tl.tensor:
    """The mass that top-p asks of `total`, to the nearest unit; the best token always stays."""
    asked = (total.to(tl.float64) * top_p + 0.5).to(tl.int64)
    return tl.minimum(tl.maximum(asked, 1), total)


@triton.jit
def tighten(
    pivot: tl.tensor,
    weight: tl.tensor,
    target: tl.tensor,
    lo: tl.tensor,
    hi: tl.tensor,
    below: tl.tensor,
    upto: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The interval (lo, hi, below, upto), given the weight up to a pivot."""
    is_enough = weight >= target
    upto = tl.where(is_enough & (pivot < hi), weight, upto)
    hi = tl.where(is_enough & (pivot < hi), pivot, hi)
    below = tl.where((weight < target) & (pivot > lo), weight, below)
    lo = tl.where((weight < target) & (pivot > lo), pivot, lo)
    return lo, hi, below, upto


@triton.jit
def tighten_by_pass(
    state: tl.tensor,
    PASS: tl.constexpr,
    target: tl.tensor,
    lo: tl.tensor,
    hi: tl.tensor,
    below: tl.tensor,
    upto: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The interval after a pass; everything is int64.

    If all of a row's tokens weigh less than the target, it is empty, at the worst rank.
    """
    for i in tl.static_range(NUM_PIVOTS):
        pivot = tl.load(state + PIVOTS + PASS * NUM_PIVOTS + i)
        weight = tl.load(state + SUMS + PASS * NUM_PIVOTS + i)
        lo, hi, below, upto = tighten(pivot, weight, target, lo, hi, below, upto)
    return lo, hi, below, upto


@triton.jit
def interval_after_first_pass(
    state: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, VOCAB_SIZE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(target, lo, hi, below, upto); the first pass's last pivot is the worst rank there is."""
    hi = tl.load(state + PIVOTS + NUM_PIVOTS - 1)
    total = tl.load(state + SUMS + NUM_PIVOTS - 1)
    counts = counts_tokens(top_k, VOCAB_SIZE)
    target = tl.where(counts, top_k.to(tl.int64), mass_target(total, top_p))
    nothing = tl.zeros((), tl.int64)
    lo, hi, below, upto = tighten_by_pass(state, 0, target, nothing - 1, hi, nothing, total)
    return target, lo, hi, below, upto
