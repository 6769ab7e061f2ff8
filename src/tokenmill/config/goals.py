"""Limits on a request's latency, and percentiles, as they are written on a command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from tokenmill.errors import ConfigError, shown

GOALS = ("ttft", "tpot", "e2el")
"""Figures of a request that `goodput` may bound: milliseconds to the first token, for each token
after it, and in all.
"""


def parse_goals(goodput: str | None) -> Mapping[str, float]:
    """Figure to its limit in milliseconds, of `ttft:500,tpot:50`. Raises `ConfigError`."""
    goals: dict[str, float] = {}
    for part in (goodput or "").split(","):
        name, _, limit = part.partition(":")
        if not part.strip():
            continue
        try:
            goals[name.strip()] = float(limit)
        except ValueError:
            goals[name.strip()] = math.nan
        if name.strip() not in GOALS or not goals[name.strip()] > 0:
            raise ConfigError(
                f"goodput={shown(goodput)} must name limits in milliseconds:"
                f" {','.join(f'{goal}:500' for goal in GOALS)}."
            )
    return MappingProxyType(goals)


def parse_percentiles(percentiles: str) -> list[float]:
    """Numbers from 0 to 100, of `50,99`. Raises `ConfigError`."""
    try:
        percents = [float(part) for part in percentiles.split(",")]
    except ValueError:
        percents = []
    if not percents or not all(0 <= percent <= 100 for percent in percents):
        raise ConfigError(
            f"percentiles={shown(percentiles)} must be numbers from 0 to 100 with commas: 50,99."
        )
    return percents
