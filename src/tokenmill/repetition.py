"""Endless repetitions: what counts as one, and finding it at the end of an output."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenmill import parameter_checks as check

MAX_PATTERN_SIZE = 1_024
"""Tokens of the longest pattern that is looked for."""
MAX_COUNT = 2**31 - 1

_NAME = "repetition_detection"


class RepetitionDetectionParams(
    msgspec.Struct, metaclass=check.StrictKeywords, frozen=True, kw_only=True, omit_defaults=True
):
    """Which repetitions end a request: its output ends with one pattern several times in a row.

    Raises `InvalidRequestError` that names the parameter, its value and its limit.
    """

    max_pattern_size: int
    """Tokens of the longest pattern that is looked for, 1 to 1024."""
    min_pattern_size: int = 1
    """Tokens of the shortest one; 0 is 1."""
    min_count: int = 2
    """How often the pattern must be there, one right after the other; at least 2."""

    def __post_init__(self) -> None:
        longest = check.integer(
            f"{_NAME}.max_pattern_size", self.max_pattern_size, 1, MAX_PATTERN_SIZE
        )
        shortest = check.integer(f"{_NAME}.min_pattern_size", self.min_pattern_size, 0, longest)
        count = check.integer(f"{_NAME}.min_count", self.min_count, 2, MAX_COUNT)
        msgspec.structs.force_setattr(self, "max_pattern_size", longest)
        msgspec.structs.force_setattr(self, "min_pattern_size", max(shortest, 1))
        msgspec.structs.force_setattr(self, "min_count", count)


def ends_with_repetition(
    token_ids: Sequence[int], start: int, params: RepetitionDetectionParams
) -> bool:
    """Whether the tokens from `start` on end with a pattern as often as `params` says.

    A function of the tokens alone, so that it does not matter how a request got to them.
    """
    end = len(token_ids)
    last = token_ids[-1]
    longest = min(params.max_pattern_size, (end - start) // params.min_count)
    for size in range(params.min_pattern_size, longest + 1):
        if token_ids[end - 1 - size] != last:
            continue
        first = end - size * params.min_count
        # Each token equals the one a pattern before it.
        if token_ids[first + size : end] == token_ids[first : end - size]:
            return True
    return False
