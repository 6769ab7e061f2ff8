"""What a request keeps of its hidden states while its prompt is computed in pieces.

A state is never changed: `add` gives the next one, so that a step which fails can be run again. The
result has the same bits however the prompt was cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch

_MEAN_BITS = 30
"""Sums are of whole multiples of 2 ** -30, which float64 adds exactly (while a sum stays under
2 ** 22) and therefore in any order with the same result."""


class PoolState(Protocol):
    """Hidden states of a request's tokens so far."""

    def add(self, hidden_states: torch.Tensor) -> Self:
        """The state after more tokens, [n, hidden_size] with n at least 1."""
        ...

    def result(self) -> torch.Tensor:
        """float32 [hidden_size], or [num_tokens, hidden_size] of all tokens."""
        ...


@dataclass(frozen=True, slots=True)
class LastToken:
    """The last token's hidden state."""

    row: torch.Tensor | None = None

    def add(self, hidden_states: torch.Tensor) -> Self:
        return replace(self, row=hidden_states[-1].float().clone())

    def result(self) -> torch.Tensor:
        assert self.row is not None
        return self.row


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token's."""

    row: torch.Tensor | None = None

    def add(self, hidden_states: torch.Tensor) -> Self:
        return self if self.row is not None else replace(self, row=hidden_states[0].float().clone())

    def result(self) -> torch.Tensor:
        assert self.row is not None
        return self.row


@dataclass(frozen=True, slots=True)
class MeanOfTokens:
    """The mean of all."""

    total: torch.Tensor | None = None
    """float64 [hidden_size], in units of 2 ** -30."""
    count: int = 0

    def add(self, hidden_states: torch.Tensor) -> Self:
        units = torch.round(hidden_states.double() * 2.0**_MEAN_BITS).sum(0)
        total = units if self.total is None else self.total + units
        return replace(self, total=total, count=self.count + len(hidden_states))

    def result(self) -> torch.Tensor:
        assert self.total is not None
        return (self.total / (self.count * 2.0**_MEAN_BITS)).float()


@dataclass(frozen=True, slots=True)
class EveryToken:
    """All of them."""

    pieces: tuple[torch.Tensor, ...] = ()

    def add(self, hidden_states: torch.Tensor) -> Self:
        return replace(self, pieces=(*self.pieces, hidden_states.float().clone()))

    def result(self) -> torch.Tensor:
        return torch.cat(self.pieces)


STATES: dict[str, type[PoolState]] = {
    "last": LastToken,
    "cls": FirstToken,
    "mean": MeanOfTokens,
}
"""By `PoolingConfig.pooling_type`."""
