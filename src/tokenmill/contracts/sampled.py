"""What ranks are told that do not see what a step has sampled."""

from __future__ import annotations

import msgspec


class SampledTokens(msgspec.Struct, array_like=True):
    """The tokens of one step; lists by request."""

    req_ids: list[str]
    rows: list[int]
    token_ids: list[list[int]]
