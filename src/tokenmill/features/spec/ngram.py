"""Prompt lookup: drafts are what followed the last few tokens where they stood before.

Texts that repeat what they were given, such as edited code, summaries and quotations, are full of
such places; the lookup takes microseconds, and where it finds nothing there are no drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenmill.config.speculation import SpeculativeConfig
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.features.spec.acceptance import Acceptance
from tokenmill.features.spec.lengths import StepTimer, choose_lengths
from tokenmill.kernels.ngram_index import ngram_index

IntArray = npt.NDArray[np.int64]


class NgramDrafter:
    """Looks up the last tokens of each request among its own."""

    def __init__(
        self, config: SpeculativeConfig, max_num_seqs: int, timer: StepTimer | None = None
    ) -> None:
        self._num_drafts = config.num_speculative_tokens
        self._adapts = config.adaptive
        self._index = ngram_index(max_num_seqs, config.prompt_lookup_min, config.prompt_lookup_max)
        self._generations = np.zeros(max_num_seqs, np.int64)
        self._acceptance = Acceptance(max_num_seqs, num_kinds=config.prompt_lookup_max + 1)
        self._timer = timer or StepTimer(largest=1 + self._num_drafts)

    def update(self, plan: SchedulerOutput) -> None:
        """Note which rows have other requests now, and when the step began."""
        for request in plan.scheduled_new_reqs:
            self._generations[request.row] += 1
            self._acceptance.clear(request.row)
        self._timer.begin(plan.num_scheduled_tokens)

    def propose(
        self,
        req_ids: Sequence[str],
        rows: IntArray,
        num_tokens: IntArray,
        token_ids: npt.NDArray[np.int32],
    ) -> dict[str, list[int]]:
        """Drafts of the requests whose last tokens stood before, as many as are worth it."""
        self._timer.end()
        most = np.full(len(rows), self._num_drafts, np.int64)
        found = self._index.propose(rows, self._generations[rows], token_ids, num_tokens, most)
        if not self._adapts:
            return {
                req_id: drafts for req_id, (drafts, _) in zip(req_ids, found, strict=True) if drafts
            }
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
        lengths = choose_lengths(
            rates, [self._num_drafts] * len(rates), len(req_ids), self._timer.cost
        )
        return {
            req_ids[place]: found[place][0][:length]
            for place, length in zip(places, lengths, strict=True)
            if length
        }
