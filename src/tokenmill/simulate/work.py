"""What a step computes, as sums over its requests: all that its time depends on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import msgspec

from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.core.request import Request


class StepWork(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step."""

    num_requests: int
    num_tokens: int
    num_logits: int
    num_keys: int
    """Keys that are read, over all attention layers: of each request those that its tokens see."""
    num_scores: int
    """Pairs of a query and a key that it sees, over all attention layers."""


class StepTime(StepWork, frozen=True, omit_defaults=True):
    """A step that an engine has made, and how long it took: a line of a file of step times."""

    seconds: float = 0.0


class WorkCounter:
    """Counts the work of steps of a model with this KV cache."""

    def __init__(self, cache: KVCacheConfig) -> None:
        counts: Counter[int | None] = Counter()
        for group in cache.token_groups:
            counts[group.spec.sliding_window] += len(group.layer_names)
        self._layers = list(counts.items())
        """(window, number of layers) of each kind."""
        self.num_layers = counts.total()
        self.sees_all = set(counts) <= {None}
        """Whether no layer has a window."""

    def of_request(self, num_tokens: int, end: int) -> tuple[int, int]:
        """Keys and scores of a request's `num_tokens` tokens, the last at position `end` - 1."""
        if self.sees_all:
            return (
                self.num_layers * end,
                self.num_layers * (num_tokens * end - num_tokens * (num_tokens - 1) // 2),
            )
        num_keys = num_scores = 0
        for window, num_layers in self._layers:
            seen = end if window is None else min(end, window + num_tokens - 1)
            scores = _sum_seen(end, window) - _sum_seen(end - num_tokens, window)
            num_keys += num_layers * seen
            num_scores += num_layers * scores
        return num_keys, num_scores

    def of_decode(self, ends: Collection[int]) -> StepWork:
        """Of a step with one token for each request, which has so many tokens then. No windows."""
        count, num_keys = len(ends), self.num_layers * sum(ends)
        return StepWork(count, count, count, num_keys, num_keys)

    def next_decode(self, work: StepWork) -> StepWork:
        """Of the step behind one that only decodes, with the same requests. No windows."""
        num_keys = work.num_keys + self.num_layers * work.num_requests
        return StepWork(work.num_requests, work.num_tokens, work.num_logits, num_keys, num_keys)

    def of(self, plan: SchedulerOutput, requests: Mapping[str, Request]) -> StepWork:
        """Of a plan that has just been made: the counters of its requests stand behind it."""
        counts = zip(plan.req_ids, plan.num_scheduled_tokens, strict=True)
        num_keys = num_scores = 0
        for request_id, num_tokens in counts:
            keys, scores = self.of_request(num_tokens, requests[request_id].num_computed_tokens)
            num_keys += keys
            num_scores += scores
        num_tokens = plan.total_num_scheduled_tokens
        return StepWork(len(plan.req_ids), num_tokens, sum(plan.num_logits), num_keys, num_scores)


def _sum_seen(num_tokens: int, window: int | None) -> int:
    """Keys that the first `num_tokens` tokens see: each those before it and itself, in a window."""
    short = num_tokens if window is None else min(num_tokens, window)
    return short * (short + 1) // 2 + (num_tokens - short) * (window or 0)
