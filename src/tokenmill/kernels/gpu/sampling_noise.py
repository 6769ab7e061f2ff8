"""Gumbel noise of `sampling/random.py` inside kernels, and the best of noisy tokens.

The exact noise of a token takes two logarithms in float64. Nearly every token can be seen to lose
from float32 alone, so only those within a margin of the best one are computed exactly: about one a
call. The token is the same as if all of them were.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_TOKEN = tl.constexpr(0x7FFFFFFF)
"""Greater than any token id."""

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_RESOLUTION = tl.constexpr(2.0**-52)

# Noise lies between -log(53 log 2) > -3.61 and 53 log 2 < 36.74. The best token has a logit of 0,
# so one with less than -(3.61 + 36.74) always loses.
_HOPELESS = tl.constexpr(-41.0)

# What float32 leaves of the ratio below is right to 1 / 1000.
_MARGIN = tl.constexpr(1.0 - 2.0**-6)


@triton.jit
def _mix64(z: tl.tensor) -> tl.tensor:
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def stream_key(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The uint64 key of a position's noise; seed and position are integers of up to 64 bits."""
    steps = position.to(tl.uint64) + 1
    return _mix64(_mix64(seed.to(tl.uint64) + _GOLDEN) + steps * _GOLDEN)


@triton.jit
def _noise_bits(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """52 random bits of each token id, int64."""
    steps = ids.to(tl.uint64) + 1
    return (_mix64(steps * _GOLDEN + key) >> 12).to(tl.int64)


@triton.jit
def gumbel_noise(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise of token ids, float32."""
    uniform = (_noise_bits(key, ids).to(tl.float64) + 0.5) * _RESOLUTION
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _exponential(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """About exp(-gumbel_noise), float32: -log(uniform)."""
    bits = _noise_bits(key, ids)
    uniform = (bits.to(tl.float32) + 0.5) * _RESOLUTION
    # Near 1, float32 has lost the difference from 1; it is computed from the other end.
    rest = ((0xFFFFFFFFFFFFF - bits).to(tl.float32) + 0.5) * _RESOLUTION
    return tl.where(rest < 0.015625, rest + 0.5 * rest * rest, -tl.log(uniform))


@triton.jit
def best_noisy(
    scaled: tl.tensor,
    ids: tl.tensor,
    takes_part: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    token: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """The best of (value, token) and of scaled + noise, where tokens take part; ties: smallest id.

    `scaled` is float32 [N], at most 0, `ids` int32 [N]; value and token are scalars, -inf and
    NO_TOKEN at first. Tokens that cannot be the row's best are left out.
    """
    # The argmax of logit + noise is that of exp(logit) / exp(-noise).
    ratio = tl.exp(scaled) / _exponential(key, ids)
    ratio = tl.where(takes_part & (scaled > _HOPELESS), ratio, 0.0)
    least = tl.maximum(tl.max(ratio, axis=0), tl.exp(value)) * _MARGIN
    left = tl.where((ratio > 0.0) & (ratio >= least), ids, NO_TOKEN)
    candidate = tl.min(left, axis=0)
    while candidate < NO_TOKEN:
        logit = tl.max(tl.where(ids == candidate, scaled, float("-inf")), axis=0)
        noisy = logit + gumbel_noise(key, candidate)
        is_better = (noisy > value) | ((noisy == value) & (candidate < token))
        value = tl.where(is_better, noisy, value)
        token = tl.where(is_better, candidate, token)
        left = tl.where(left > candidate, left, NO_TOKEN)
        candidate = tl.min(left, axis=0)
    return value, token
