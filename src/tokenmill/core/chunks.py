"""How many tokens of a prompt a step takes: fewer beside requests that decode, and fewer, the
longer the past that they attend to.

Work is counted in tokens without attention: the products of one token are 1, and each key that it
sees, in each layer, adds a little. Without this a step behind 32,000 tokens of a prompt would take
several times as long as the first one, and the streams beside it would stand still that long.

Where nobody decodes, nobody waits for the step's end but the prompts themselves, and large chunks
serve them best. Where others do, a step ends in less time: it computes `shared_tokens`, or, if
those that decode are many, twice as much for prompts as for them, so that prompts do not pile up.
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
PROMPTS_SHARE = 2
"""Work of prompts in a step, at least, in parts of that of the requests that decode. A request of
the usual kind brings a prompt half as long as its answer, so there is room for four times as many
as come on average."""
SMALLEST_SHARE = 32
"""Work of prompts in a step, however many decode: with fewer rows products take nearly as long."""


class ChunkSizes:
    """Work of tokens, for a model with these groups of layers."""

    def __init__(self, config: SchedulerConfig, groups: Sequence[KVCacheGroup]) -> None:
        self._budget = SLACK * config.max_num_batched_tokens
        """Work of one step."""
        self._shared_budget = config.shared_tokens
        """Work of a step in which requests decode; 0 if that makes no difference."""
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
        return num_tokens <= SMALLEST or not (self._cost_per_key or self._shared_budget)

    def room(self, decode_work: float) -> float:
        """Work that all prompts of a step may be, beside requests that decode with so much."""
        room = self._budget - decode_work
        if decode_work and self._shared_budget:
            left = self._shared_budget - decode_work
            room = min(room, max(left, PROMPTS_SHARE * decode_work, SMALLEST_SHARE))
        return room

    def fitting(self, first: int, most: int, room: float, taken: float) -> int:
        """How many tokens from position `first` on, at most `most`, fit into the `room` of which
        other prompts have `taken` some.

        `SMALLEST` of them always do if nothing is taken, so that the first prompt comes forward;
        later ones get so many or none.
        """
        if self.never_cut(most):
            return most
        left = room - taken
        if taken and self.work(first, SMALLEST) > left:
            return 0
        counts = range(SMALLEST + 1, most + 1)
        return SMALLEST + bisect_right(counts, left, key=lambda count: self.work(first, count))


def _keys_seen(num_tokens: int, window: int) -> int:
    """By all of the first `num_tokens` tokens: by each those before it and itself, in its window.

    >>> [_keys_seen(n, window=3) for n in range(6)]
    [0, 1, 3, 6, 9, 12]
    """
    short = min(num_tokens, window)
    return short * (short + 1) // 2 + (num_tokens - short) * window
