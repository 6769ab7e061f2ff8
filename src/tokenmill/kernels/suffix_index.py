"""What most often followed the last few tokens, in all requests so far: Python's way, and the same
in one native call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.kernels import native
from tokenmill.kernels.ngram_index import Ids, Lookup, Numbers

Salts = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_MOST_SEEN = 65535
PLACE_BYTES = 12


class SuffixIndex(Protocol):
    """A table of contexts, of all requests together, and what followed them."""

    def propose(
        self,
        rows: Numbers,
        generations: Numbers,
        salts: Salts,
        token_ids: Ids,
        num_tokens: Numbers,
        max_drafts: Numbers,
    ) -> Sequence[Lookup]:
        """Drafts behind token_ids[rows[i], : num_tokens[i]], at most max_drafts[i] of them.

        Each draft is what mostly followed the longest context that is known. New tokens of the rows
        are taken in first; those of a row never change while its generation stays. Requests with
        different salts learn nothing from each other. `token_ids` is int32 [num_rows, max_len],
        `salts` uint64 [num_reqs]; the others are int64 [num_reqs].
        """
        ...


def suffix_index(
    num_rows: int, shortest: int, longest: int, num_places: int, least_probability: float
) -> SuffixIndex:
    """Of contexts of `shortest` to `longest` tokens, 1 to 255, in a table of `num_places`, a power
    of two; drafts end where all of them together hold less often than `least_probability`. Native
    where it can be had.
    """
    if not native.is_available():
        return PythonSuffixIndex(num_rows, shortest, longest, num_places, least_probability)
    index: SuffixIndex = native.module().SuffixIndex(
        num_rows, shortest, longest, num_places, least_probability
    )
    return index


class PythonSuffixIndex:
    """The reference."""

    def __init__(
        self,
        num_rows: int,
        shortest: int,
        longest: int,
        num_places: int,
        least_probability: float,
    ) -> None:
        self._shortest, self._longest = shortest, longest
        self._num_places = num_places
        self._least_probability = least_probability
        self._places: dict[int, list[int]] = {}
        """Place to tag, token id, times that it followed, times that the context was seen."""
        self._generations = [-1] * num_rows
        self._num_indexed = [0] * num_rows

    def propose(
        self,
        rows: Numbers,
        generations: Numbers,
        salts: Salts,
        token_ids: Ids,
        num_tokens: Numbers,
        max_drafts: Numbers,
    ) -> Sequence[Lookup]:
        """As the protocol says."""
        requests = zip(
            rows.tolist(),
            generations.tolist(),
            salts.tolist(),
            num_tokens.tolist(),
            max_drafts.tolist(),
            strict=True,
        )
        found = []
        for row, generation, salt, count, most in requests:
            tokens = token_ids[row, :count].tolist()
            if self._generations[row] != generation:
                self._generations[row], self._num_indexed[row] = generation, 0
            self._take_in(row, salt, tokens)
            found.append(self._continue(salt, tokens[-self._longest :], most))
        return found

    def _take_in(self, row: int, salt: int, tokens: list[int]) -> None:
        for following in range(max(self._num_indexed[row], self._shortest), len(tokens)):
            for count in range(self._shortest, min(self._longest, following) + 1):
                context = context_of(salt, tokens[following - count : following])
                self._observe(context, tokens[following])
        self._num_indexed[row] = max(self._num_indexed[row], len(tokens))

    def _observe(self, context: int, token_id: int) -> None:
        place, tag = context & (self._num_places - 1), context >> 32
        entry = self._places.get(place)
        if entry is None or (entry[0] != tag and entry[3] == 1):
            self._places[place] = [tag, token_id, 1, 1]
            return
        if entry[0] != tag or entry[3] == _MOST_SEEN:
            entry[2] //= 2
            entry[3] //= 2
        if entry[0] != tag:
            return
        entry[3] += 1
        if entry[1] == token_id:
            entry[2] += 1
        elif entry[2] > 1:
            entry[2] -= 1
        else:
            entry[1:3] = token_id, 1

    def _continue(self, salt: int, text: list[int], max_drafts: int) -> Lookup:
        drafts: list[int] = []
        matched, likely = 0, 1.0
        while len(drafts) < max_drafts:
            known = self._longest_known(salt, text + drafts)
            if known is None:
                break
            count, token_id, probability = known
            likely *= probability
            if likely < self._least_probability:
                break
            matched = matched or count
            drafts.append(token_id)
        return drafts, matched

    def _longest_known(self, salt: int, text: list[int]) -> tuple[int, int, float] | None:
        """Length of the longest context that is known, what follows, and how likely."""
        for count in range(min(self._longest, len(text)), self._shortest - 1, -1):
            context = context_of(salt, text[len(text) - count :])
            entry = self._places.get(context & (self._num_places - 1))
            if entry is not None and entry[0] == context >> 32:
                return count, entry[1], entry[2] / (entry[3] + 1.0)
        return None


def context_of(salt: int, token_ids: list[int]) -> int:
    """The hash of a context, 64 bits."""
    value = _mixed(salt * 0x9E3779B97F4A7C15 + len(token_ids))
    for token_id in token_ids:
        value = _mixed(value ^ token_id)
    return value


def _mixed(value: int) -> int:
    value = value * 0xFF51AFD7ED558CCD & _MASK
    return value ^ value >> 32
