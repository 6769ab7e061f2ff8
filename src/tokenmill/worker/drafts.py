"""Drafts: guesses of the next tokens, computed beside the known ones and kept as far as they hold.

A draft holds exactly if it equals the token that is sampled there with the row's own noise. What
comes out is then the same with and without drafts, at every temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.contracts.plan import SchedulerOutput

IntArray = npt.NDArray[np.int64]


class Drafter(Protocol):
    """Proposes tokens for the next step."""

    def update(self, plan: SchedulerOutput) -> None:
        """A step begins whose differences the rows have; once for each plan, in order."""
        ...

    def propose(
        self,
        req_ids: Sequence[str],
        rows: IntArray,
        num_tokens: IntArray,
        token_ids: npt.NDArray[np.int32],
    ) -> dict[str, list[int]]:
        """Drafts by request; requests without are left out.

        Request i has the tokens `token_ids[rows[i], : num_tokens[i]]`, those just sampled
        included; they are the requests that the step begun last has brought tokens. `token_ids` is
        the whole table and must not be written.
        """
        ...


class NullDrafter:
    """Proposes nothing."""

    def update(self, plan: SchedulerOutput) -> None:
        """Forget it."""

    def propose(
        self,
        req_ids: Sequence[str],
        rows: IntArray,
        num_tokens: IntArray,
        token_ids: npt.NDArray[np.int32],
    ) -> dict[str, list[int]]:
        return {}


def count_new_tokens(
    sampled_ids: IntArray, draft_ids: npt.NDArray[np.int32], starts: IntArray, counts: IntArray
) -> IntArray:
    """How many tokens each request gains: its drafts that hold, and the token sampled after them.

    `sampled_ids` and `draft_ids` are [n]: draft_ids[j] is the draft for the place that
    sampled_ids[j] was sampled for. Request i owns the entries starts[i] to starts[i] + counts[i],
    the last of which has no draft; it gains 0 if counts[i] is 0, else 1 to counts[i] tokens.
    """
    holds = sampled_ids == draft_ids
    holds[(starts + counts - 1)[counts > 0]] = False
    breaks = np.flatnonzero(~holds)
    gained = np.zeros_like(counts)
    sampling = counts > 0
    first_break = breaks[np.searchsorted(breaks, starts[sampling])]
    gained[sampling] = first_break - starts[sampling] + 1
    return gained
