"""Drafts that are looked up in texts: no model makes them, and a lookup takes microseconds.

ngram     what followed a request's last few tokens where they stood before in the request itself
suffix    what mostly followed them in this request and all those before it

Texts that repeat what they were given, such as edited code, summaries and quotations, are full of
such places; where a lookup finds nothing there are no drafts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.config.speculation import SpeculativeConfig
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.features.spec.acceptance import Acceptance
from tokenmill.features.spec.lengths import StepTimer, choose_lengths
from tokenmill.kernels.ngram_index import Ids, Lookup, Numbers, ngram_index
from tokenmill.kernels.suffix_index import suffix_index

_SHORTEST_CONTEXT = 2


class TextIndex(Protocol):
    """Where drafts are looked up."""

    def enter(self, row: int, cache_salt: str | None) -> None:
        """Another request is in the row."""
        ...

    def propose(
        self, rows: Numbers, token_ids: Ids, num_tokens: Numbers, max_drafts: Numbers
    ) -> Sequence[Lookup]:
        """Drafts of each request, and how many of its last tokens they follow from."""
        ...


class OwnText:
    """A request's own tokens."""

    def __init__(self, config: SpeculativeConfig, max_num_seqs: int) -> None:
        self._index = ngram_index(max_num_seqs, config.prompt_lookup_min, config.prompt_lookup_max)
        self._generations = np.zeros(max_num_seqs, np.int64)

    def enter(self, row: int, cache_salt: str | None) -> None:
        """Forget the request before."""
        self._generations[row] += 1

    def propose(
        self, rows: Numbers, token_ids: Ids, num_tokens: Numbers, max_drafts: Numbers
    ) -> Sequence[Lookup]:
        """What followed the longest of the last runs at its latest occurrence."""
        generations = self._generations[rows]
        return self._index.propose(rows, generations, token_ids, num_tokens, max_drafts)


class AllTexts:
    """The tokens of all requests; those with a salt of their own are kept apart."""

    def __init__(self, config: SpeculativeConfig, max_num_seqs: int) -> None:
        self._index = suffix_index(
            max_num_seqs,
            min(_SHORTEST_CONTEXT, config.suffix_decoding_max_tree_depth),
            config.suffix_decoding_max_tree_depth,
            config.num_suffix_places,
            config.suffix_decoding_min_token_prob,
        )
        self._generations = np.zeros(max_num_seqs, np.int64)
        self._salts = np.zeros(max_num_seqs, np.uint64)

    def enter(self, row: int, cache_salt: str | None) -> None:
        """Learn the tokens of another request, beside those of the same salt."""
        self._generations[row] += 1
        digest = hashlib.blake2b((cache_salt or "").encode(), digest_size=8).digest()
        self._salts[row] = int.from_bytes(digest, "little")

    def propose(
        self, rows: Numbers, token_ids: Ids, num_tokens: Numbers, max_drafts: Numbers
    ) -> Sequence[Lookup]:
        """What mostly followed the longest context that is known."""
        return self._index.propose(
            rows, self._generations[rows], self._salts[rows], token_ids, num_tokens, max_drafts
        )


class LookupDrafter:
    """Sends the drafts that were found, as many as are worth it."""

    def __init__(
        self,
        texts: TextIndex,
        config: SpeculativeConfig,
        max_num_seqs: int,
        timer: StepTimer | None = None,
    ) -> None:
        self._texts = texts
        self._num_drafts = config.num_speculative_tokens
        self._adapts = config.adaptive
        self._acceptance = Acceptance(max_num_seqs, num_kinds=config.longest_lookup + 1)
        self._timer = timer or StepTimer(largest=1 + self._num_drafts)

    def update(self, plan: SchedulerOutput) -> None:
        """Note which rows have other requests now, and when the step began."""
        for request in plan.scheduled_new_reqs:
            self._texts.enter(request.row, request.cache_salt)
            self._acceptance.clear(request.row)
        self._timer.begin(plan.num_scheduled_tokens)

    def propose(
        self,
        req_ids: Sequence[str],
        rows: Numbers,
        num_tokens: Numbers,
        token_ids: npt.NDArray[np.int32],
    ) -> dict[str, list[int]]:
        """Drafts of the requests for which some were found, as many as are worth it."""
        self._timer.end()
        most = np.full(len(rows), self._num_drafts, np.int64)
        found = self._texts.propose(rows, token_ids, num_tokens, most)
        if not self._adapts:
            named = zip(req_ids, found, strict=True)
            return {req_id: drafts for req_id, (drafts, _) in named if drafts}
        places, rates = [], []
        known = zip(rows.tolist(), num_tokens.tolist(), found, strict=True)
        for place, (row, count, (drafts, matched)) in enumerate(known):
            self._acceptance.observe(row, token_ids[row], count)
            if drafts:
                self._acceptance.expect(row, count, drafts, matched)
                places.append(place)
                rates.append(self._acceptance.rate(row, matched))
        if not places or self._timer.wants_plain:
            return {}
        numbers = [len(found[place][0]) for place in places]
        lengths = choose_lengths(rates, numbers, len(req_ids), self._timer.cost)
        return {
            req_ids[place]: found[place][0][:length]
            for place, length in zip(places, lengths, strict=True)
            if length
        }
