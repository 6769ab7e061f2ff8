"""What may be set about a load on a server; flags of `tokenmill bench serve`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.config.argument_types import at_least
from tokenmill.config.goals import parse_goals, parse_percentiles
from tokenmill.errors import ConfigError, did_you_mean, shown

ENDPOINTS = ("completions", "chat")
_COUNTS = {"num_prompts": 1, "input_len": 1, "output_len": 1, "num_warmup": 0}


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """A load on a server that speaks OpenAI's protocol. Raises `ConfigError`."""

    base_url: str = "http://127.0.0.1:8000"
    """Where the server is, without /v1."""
    model: str | None = None
    """Name of the model; the first that the server lists unless given."""
    endpoint: str = "completions"
    """completions or chat."""
    sharegpt: str | None = None
    """A ShareGPT file (JSON): first turns as prompts, answers of the second's length. Without it
    prompts are random words."""
    num_prompts: int = 100
    """Requests."""
    input_len: int = 128
    """Words of a random prompt, each about one token."""
    output_len: int = 128
    """Tokens generated for a random prompt."""
    request_rate: float = math.inf
    """Requests a second, at random times (Poisson); inf sends all at once."""
    concurrency: int | None = None
    """Most requests at the same time; None is no limit."""
    temperature: float = 0.0
    """Of all requests."""
    stop_early: bool = False
    """Let the model end an answer; otherwise every answer has its full length (ignore_eos)."""
    goodput: str | None = None
    """Limits that a good request keeps, in milliseconds: ttft:500,tpot:50,e2el:10000."""
    percentiles: str = "50,90,99"
    """Which to show, with commas."""
    num_warmup: int = 1
    """Requests before, which do not count."""
    seed: int = 0
    """Of prompts and times."""
    timeout: float = 600.0
    """Seconds for one request."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, as JSON."""

    def __post_init__(self) -> None:
        for name, least in _COUNTS.items():
            at_least(name, getattr(self, name), least)
        if self.concurrency is not None:
            at_least("concurrency", self.concurrency, 1)
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(
                f"endpoint={shown(self.endpoint)} must be one of: {', '.join(ENDPOINTS)}."
                f"{did_you_mean(self.endpoint, ENDPOINTS)}"
            )
        for name in ("request_rate", "timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be more than 0.")
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"base_url={shown(self.base_url)} must begin with http:// or https://."
            )
        self.goals()
        self.percents()

    def goals(self) -> Mapping[str, float]:
        """Figure to its limit in milliseconds."""
        return parse_goals(self.goodput)

    def percents(self) -> list[float]:
        """The percentiles to show."""
        return parse_percentiles(self.percentiles)
