"""Random numbers without a state: noise is a pure function of (seed, position, token id).

So a request's tokens do not depend on its neighbours, on chunks, preemption or drafts, and a kernel
can make the noise of any token by itself. All in unsigned 64-bit arithmetic that wraps:

    mix64(z):  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
               z = (z ^ z >> 27) * 0x94D049BB133111EB
               z ^ z >> 31
    key     =  mix64(mix64(seed + GOLDEN) + (position + 1) * GOLDEN)
    bits    =  mix64(key + (token_id + 1) * GOLDEN)
    uniform =  ((bits >> 12) + 0.5) / 2**52                  float64, in (0, 1), exact
    gumbel  =  float32(-log(-log(uniform)))                  logarithms in float64

`position` is the place in the sequence of the token to be sampled. `mix64` and `GOLDEN` are those
of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). The
logarithms are in float64 so that two libraries' last bits hardly ever reach the float32 result.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble each 64-bit number; one to one."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream_keys(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """The key of each sampled position's noise; all arrays have one shape."""
    return mix64(mix64(seeds + GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN)


def gumbel_noise(key: np.uint64, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Standard Gumbel noise of each of `token_ids` under one key, float32 of the same shape.

    The argmax of logits plus this noise is a draw from softmax(logits).
    """
    bits = mix64((token_ids.astype(np.uint64) + np.uint64(1)) * GOLDEN + key)
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return (-np.log(-np.log(uniform))).astype(np.float32)
