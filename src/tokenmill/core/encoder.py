"""Images of requests, as the scheduler sees them: when each is encoded, and how long it is kept.

    prompt        t t [ i i i i i i ] t [ j j j ] t t        i, j: placeholders of two items
    step 1        <--------------->                          i is encoded; j does not fit the budget
    step 2                        <------------->            j is encoded; i has settled: released

An item is encoded in the first step that reaches its placeholders, and as a whole. Its placeholders
may be computed in several steps: the item is kept until the last of them has settled. What the
prefix cache has of a prompt is never reached, so an item that lies wholly in it is not encoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenmill.contracts.plan import EncoderWork
from tokenmill.contracts.request import EngineCoreRequest, MultiModalFeature
from tokenmill.core.encoder_cache import EncoderCache
from tokenmill.core.request import Request
from tokenmill.errors import InvalidRequestError


class EncoderSchedule:
    """Cuts chunks where an item does not fit the step, and keeps items for the requests that run.

    Args:
        max_step_embeds: most embeddings that are made in one step; an item with more is encoded in
            a step of its own, so that every item gets its turn.
        cache_size: embeddings kept at a time; 0 of an engine that takes no such requests.
        is_bidirectional: tokens of an item see all of it: a step takes the run as a whole.
    """

    def __init__(
        self, max_step_embeds: int = 0, cache_size: int = 0, *, is_bidirectional: bool = False
    ) -> None:
        self.max_step_embeds = max_step_embeds
        self._is_bidirectional = is_bidirectional
        self.cache = EncoderCache(cache_size)
        self._held: dict[str, tuple[Request, set[int]]] = {}
        """By id, the requests that hold items, and the places of these among their features."""
        self._num_queries = self._num_hits = 0

    def counts(self) -> dict[str, Any]:
        """Fields of `SchedulerStats`."""
        return {
            "encoder_cache_queries": self._num_queries,
            "encoder_cache_hits": self._num_hits,
        }

    def check(self, request: EngineCoreRequest) -> None:
        """Raise `InvalidRequestError` for an item that could never be encoded."""
        for feature in request.mm_features:
            if not self.cache.size:
                raise InvalidRequestError(
                    f"the prompt has an item of modality {feature.modality!r}, but this model"
                    f" takes text only.",
                    parameter="multi_modal_data",
                )
            if feature.num_embeds > self.cache.size:
                raise InvalidRequestError(
                    f"the prompt has an item of modality {feature.modality!r} with"
                    f" {feature.num_embeds} embeddings, but encoder_cache_size="
                    f"{self.cache.size}. Send a smaller one, or raise encoder_cache_size.",
                    parameter="multi_modal_data",
                )

    # ---- while a step is planned ----------------------------------------------------------

    def whole(self, request: Request, first: int, num_tokens: int, most: int) -> int:
        """`num_tokens` from position `first` on, or so many that no run of embeddings is cut that
        sees itself in both directions: fewer, up to where it begins; or more, up to `most`, if it
        is what comes first. The rest of a run whose beginning the prefix cache has is one as well.
        """
        if not self._is_bidirectional or first >= request.embeds_end:
            return num_tokens
        end = first + num_tokens
        for feature in request.data.mm_features:
            for begin, run_end in feature.runs:
                if begin < end < run_end:
                    if begin > first:
                        return begin - first
                    return run_end - first if run_end - first <= most else 0
        return num_tokens

    def fitting(self, request: Request, first: int, num_tokens: int) -> int:
        """How many of a request's tokens from position `first` on the step takes: those before the
        first item that finds no room.
        """
        if first >= request.embeds_end:
            return num_tokens
        cache, counted = self.cache, set()
        num_available, num_new = cache.num_available, cache.num_new
        for _, feature, start in _reached(request, first, num_tokens):
            content_hash, num_embeds = feature.content_hash, feature.num_embeds
            if content_hash in counted or cache.is_referenced(content_hash):
                continue
            is_kept = cache.is_kept(content_hash)
            is_over_budget = num_new > 0 and num_new + num_embeds > self.max_step_embeds
            if num_embeds > num_available or (is_over_budget and not is_kept):
                return start - first
            counted.add(content_hash)
            num_available -= num_embeds
            num_new += 0 if is_kept else num_embeds
        return num_tokens

    def take(self, request: Request, num_tokens: int) -> None:
        """The step computes the request's next tokens, as many as were `fitting`."""
        first = request.num_computed_tokens
        if first >= request.embeds_end:
            return
        request_id = request.request_id
        _, held = self._held.get(request_id, (request, set()))
        reached = [each for each in _reached(request, first, num_tokens) if each[0] not in held]
        if not reached:
            return
        self._held[request_id] = request, held
        # Those that are kept come first, so that none of them is evicted for another.
        reached.sort(key=lambda each: not self.cache.is_kept(each[1].content_hash))
        for index, feature, _ in reached:
            self._num_queries += 1
            self._num_hits += self.cache.add(
                feature.content_hash, feature.num_embeds, (request_id, index)
            )
            held.add(index)

    def take_work(self) -> EncoderWork | None:
        """What the plan tells the workers; None if that is nothing."""
        if not self.cache.size:
            return None
        news = self.cache.take_news()
        if news is None:
            return None
        new, evicted = news
        items = []
        for request_id, index in new:
            row = self._held[request_id][0].row
            assert row is not None
            items.append((row, index))
        return EncoderWork(items, evicted)

    # ---- afterwards -----------------------------------------------------------------------

    def settle(self, request: Request) -> None:
        """A step of the request is back: items behind which it is are released."""
        if not request.embeds_end:
            return
        num_settled = request.num_settled_tokens
        if num_settled >= request.embeds_end:
            request.is_plain = not (request.is_pooling or request.is_structured)
        if request.request_id in self._held:
            features = request.data.mm_features
            for index in list(self._held[request.request_id][1]):
                if features[index].embeds_end <= num_settled:
                    self._release(request, index)

    def release(self, request: Request) -> None:
        """The request does not run any more, and holds nothing."""
        if not request.embeds_end:
            return
        request.is_plain = False  # should it start again
        for index in list(self._held.get(request.request_id, (None, ()))[1]):
            self._release(request, index)

    def audit(self) -> list[str]:
        """Everything that is wrong, in words."""
        problems = self.cache.audit()
        problems += [
            f"{request_id} holds items and does not run"
            for request_id, (request, _) in self._held.items()
            if not request.is_running
        ]
        return problems

    def _release(self, request: Request, index: int) -> None:
        request_id = request.request_id
        held = self._held[request_id][1]
        held.remove(index)
        if not held:
            del self._held[request_id]
        self.cache.remove(request.data.mm_features[index].content_hash, (request_id, index))


NO_ENCODER = EncoderSchedule()
"""Takes text only."""


def _reached(
    request: Request, first: int, num_tokens: int
) -> Iterator[tuple[int, MultiModalFeature, int]]:
    """Items with embeddings among `num_tokens` tokens from `first` on: the place among the
    request's features, the item, and the position of the first of these.
    """
    end = first + num_tokens
    for index, feature in enumerate(request.data.mm_features):
        if feature.offset >= end:
            break
        for start, count in feature.spans:
            start += feature.offset
            if start + count > first:
                start = max(start, first)
                if start < end:
                    yield index, feature, start
                break
