"""Log-probabilities in the shapes of the two APIs, and the one of vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokenmill.entrypoints.http.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
)
from tokenmill.outputs import Logprob, PositionLogprobs

Position = tuple[int, PositionLogprobs | None]
"""A token and what is known about its place; None for a prompt's first token."""


def positions_of(
    token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs | None]
) -> Iterator[Position]:
    """Pairs of the two, which are of one length but for tokens cut off by a stop string."""
    return zip(token_ids, logprobs, strict=False)


class CompletionLogprobsWriter:
    """Writes the parallel arrays of one choice, piece by piece: offsets go on where they were."""

    def __init__(self, num_best: int, *, as_ids: bool) -> None:
        """`num_best` tokens are listed for each place; `as_ids` writes tokens as `token_id:7`."""
        self._num_best = num_best
        self._as_ids = as_ids
        self._offset = 0

    def write(self, positions: Sequence[Position], texts: Sequence[str]) -> CompletionLogprobs:
        """The next tokens; `texts` are those of tokens whose place has no entry."""
        offsets: list[int] = []
        tokens: list[str] = []
        values: list[float | None] = []
        best: list[dict[str, float] | None] = []
        for (token_id, place), text in zip(positions, texts, strict=True):
            chosen = None if place is None else place[token_id]
            own = text if chosen is None else chosen.decoded_token or ""
            offsets.append(self._offset)
            self._offset += len(own)
            tokens.append(self._name(token_id, own))
            values.append(None if chosen is None else _finite(chosen.logprob))
            best.append(None if place is None else self._best(token_id, place))
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=values,
            tokens=tokens,
            top_logprobs=best if self._num_best else None,
        )

    def _best(self, token_id: int, place: PositionLogprobs) -> dict[str, float]:
        """The best tokens and the chosen one; of several with one text the best."""
        named: dict[str, float] = {}
        ranked = best_of(place, self._num_best)
        if token_id not in dict(ranked):
            ranked.append((token_id, place[token_id]))
        for each, entry in ranked:
            named.setdefault(self._name(each, entry.decoded_token or ""), _finite(entry.logprob))
        return named

    def _name(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self._as_ids else text


def chat_logprobs(positions: Sequence[Position], num_best: int, *, as_ids: bool) -> ChatLogprobs:
    """`num_best` tokens are listed for each place, whether or not the chosen one is among them."""

    def top(token_id: int, entry: Logprob) -> TopLogprob:
        text = entry.decoded_token or ""
        return TopLogprob(
            token=f"token_id:{token_id}" if as_ids else text,
            logprob=_finite(entry.logprob),
            bytes=list(text.encode("utf-8", "replace")),
        )

    content = []
    for token_id, place in positions:
        assert place is not None  # generated tokens all have their entry
        own = top(token_id, place[token_id])
        content.append(
            TokenLogprob(
                token=own.token,
                logprob=own.logprob,
                bytes=own.bytes,
                top_logprobs=[top(*each) for each in best_of(place, num_best)],
            )
        )
    return ChatLogprobs(content=content)


def best_of(place: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The best tokens of a place in order. The chosen one comes first in `place`; it is among the
    best just if it is not in excess.
    """
    entries = list(place.items())
    if len(entries) > count:
        return entries[1 : 1 + count]
    return sorted(entries, key=lambda entry: -entry[1].logprob)


def prompt_logprobs_reply(
    places: Sequence[PositionLogprobs | None],
) -> list[dict[str, Any] | None]:
    """Of every prompt token: id to log-probability, rank and text."""
    return [
        None
        if place is None
        else {
            str(token_id): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in place.items()
        }
        for place in places
    ]


def _finite(logprob: float) -> float:
    """JSON has no infinity; a probability of 0 is written as the number that others write."""
    return max(logprob, -9999.0)
