"""How many tokens of a prompt a step takes: fewer, the longer the past that they attend to.

Work is counted in tokens without attention: the products of one token are 1, and each key that it
sees, in each layer, adds a little. Without this a step behind 32,000 tokens of a prompt would take
several times as long as the first one, and the streams beside it would stand still that long.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from tokenmill.config.engine_config import SchedulerConfig
from tokenmill.contracts.kv_cache import KVCacheGroup
from tokenmill.core.limits import max_chunk

SLACK = 1.5
"""A step may take half as long again as one with the same tokens and no past."""
SMALLEST = 8
"""No chunk is cut to fewer tokens: a step reads all weights for them."""


class ChunkSizes:
    """Work of tokens, for a model with these groups of layers."""

    def __init__(self, config: SchedulerConfig, groups: Sequence[KVCacheGroup]) -> None:
        self.budget = SLACK * config.max_num_batched_tokens
        """Work of one step."""
        self.longest = max_chunk(config)
        """Most tokens of one request."""
        self._cost_per_key = config.attention_cost
        self._layers = [
            (len(group.layer_names), group.spec.sliding_window or config.max_model_len)
            for group in groups
        ]

    def work(self, first: int, num_tokens: int) -> float:
        """Of the tokens at positions [first, first + num_tokens) of a request."""
        keys = sum(
            num_layers * (_keys_seen(first + num_tokens, window) - _keys_seen(first, window))
            for num_layers, window in self._layers
        )
        return num_tokens + self._cost_per_key * keys

    def never_cut(self, num_tokens: int) -> bool:
        """Whether so many tokens always fit."""
        return num_tokens <= SMALLEST or not self._cost_per_key

    def fitting(self, first: int, most: int, work: float) -> int:
        """How many tokens from position `first` on, at most `most`, fit into `work`.

        `SMALLEST` of them always do, so that every request comes forward.
        """
        if self.never_cut(most):
            return most
        counts = range(SMALLEST + 1, most + 1)
        return SMALLEST + bisect_right(counts, work, key=lambda count: self.work(first, count))


def _keys_seen(num_tokens: int, window: int) -> int:
    """By all of the first `num_tokens` tokens: by each those before it and itself, in its window.

    >>> [_keys_seen(n, window=3) for n in range(6)]
    [0, 1, 3, 6, 9, 12]
    """
    short = min(num_tokens, window)
    return short * (short + 1) // 2 + (num_tokens - short) * window
