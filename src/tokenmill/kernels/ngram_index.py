"""Where the last tokens of a row stood before: Python's way, and the same in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.kernels import native

Ids = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]

Lookup = tuple[list[int], int]
"""Drafts, and how long the run is that occurred before; `([], 0)` if there is none."""


class NgramIndex(Protocol):
    """The tokens of every row, by runs of a few of them."""

    def propose(
        self,
        rows: Numbers,
        generations: Numbers,
        token_ids: Ids,
        num_tokens: Numbers,
        max_drafts: Numbers,
    ) -> Sequence[Lookup]:
        """Drafts behind token_ids[rows[i], : num_tokens[i]], at most max_drafts[i] of them.

        They are what followed the longest of the row's last runs that has occurred before, at its
        latest occurrence; beyond the last token they follow themselves. The first tokens of a row
        never change while its generation stays: then only new ones are looked at. `token_ids` is
        int32 [num_rows, max_len]; the others are int64 [num_reqs].
        """
        ...


def ngram_index(num_rows: int, shortest: int, longest: int) -> NgramIndex:
    """Of runs of `shortest` to `longest` tokens, 1 to 255; native where it can be had."""
    if not native.is_available():
        return PythonNgramIndex(num_rows, shortest, longest)
    index: NgramIndex = native.module().NgramIndex(num_rows, shortest, longest)
    return index


class PythonNgramIndex:
    """The reference."""

    def __init__(self, num_rows: int, shortest: int, longest: int) -> None:
        self._lengths = range(shortest, longest + 1)
        self._generations = [-1] * num_rows
        self._ends: list[dict[bytes, int]] = [{} for _ in range(num_rows)]
        """Of each row: the tokens of a run to where its latest occurrence ends."""
        self._num_indexed = [0] * num_rows

    def propose(
        self,
        rows: Numbers,
        generations: Numbers,
        token_ids: Ids,
        num_tokens: Numbers,
        max_drafts: Numbers,
    ) -> Sequence[Lookup]:
        """As the protocol says."""
        requests = zip(
            rows.tolist(),
            generations.tolist(),
            num_tokens.tolist(),
            max_drafts.tolist(),
            strict=True,
        )
        return [
            self._propose(row, generation, token_ids[row, :count], most)
            for row, generation, count, most in requests
        ]

    def _propose(self, row: int, generation: int, tokens: Ids, max_drafts: int) -> Lookup:
        if self._generations[row] != generation:
            self._generations[row] = generation
            self._ends[row], self._num_indexed[row] = {}, 0
        ends = self._ends[row]
        for end in range(self._num_indexed[row] + 1, len(tokens)):
            for length in self._lengths:
                if length <= end:
                    ends[tokens[end - length : end].tobytes()] = end
        self._num_indexed[row] = max(self._num_indexed[row], len(tokens) - 1)
        for length in reversed(self._lengths):
            if length > len(tokens):
                continue
            start = ends.get(tokens[len(tokens) - length :].tobytes())
            if start is not None:
                following = tokens[start : start + max_drafts].tolist()
                while len(following) < max_drafts:
                    following.append(following[len(following) - (len(tokens) - start)])
                return following, length
        return [], 0
