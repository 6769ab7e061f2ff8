"""Log-probabilities on their way to the user: ids get their text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.contracts.request import TokenLogprobs
from tokenmill.outputs import FlatLogprobs, Logprob, PositionLogprobs
from tokenmill.sampling_params import SamplingParams
from tokenmill.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_CONTEXT = 4
"""A UTF-8 character spreads over at most four byte tokens."""


class LogprobsProcessor:
    """Collects one sequence's log-probabilities."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._is_flat = params.flat_logprobs
        self.positions: list[PositionLogprobs] | FlatLogprobs | None = None
        self.cumulative_logprob: float | None = None
        if params.logprobs is not None:
            self.positions = FlatLogprobs() if self._is_flat else []
            self.cumulative_logprob = 0.0
        self.prompt_positions: list[PositionLogprobs | None] | FlatLogprobs | None = None
        self._wants_prompt = params.prompt_logprobs is not None

    def update(self, entries: Sequence[TokenLogprobs], token_ids: Sequence[int]) -> None:
        """Add one entry per new token; `token_ids` is the whole output, the new ones included."""
        if self.positions is None or self.cumulative_logprob is None:
            return
        for entry in entries:
            end = len(self.positions)
            context = token_ids[max(end - _MAX_CONTEXT, 0) : end]
            self.positions.append(self._position(entry, context))
            self.cumulative_logprob += entry.logprobs[0]

    def set_prompt(self, entries: Sequence[TokenLogprobs], prompt_token_ids: Sequence[int]) -> None:
        """Take the prompt's entries: one for each token but the first, which nothing predicts."""
        if not self._wants_prompt:
            return
        positions: list[PositionLogprobs | None] = [None]
        for i, entry in enumerate(entries, start=1):
            context = prompt_token_ids[max(i - _MAX_CONTEXT, 0) : i]
            positions.append(self._position(entry, context))
        self.prompt_positions = FlatLogprobs(positions) if self._is_flat else positions

    def _position(self, entry: TokenLogprobs, context: Sequence[int]) -> PositionLogprobs:
        """The chosen token with its rank, then the best ones, ranked by their order, or those that
        were named.
        """
        chosen, *others = zip(entry.token_ids, entry.logprobs, strict=True)
        position = {chosen[0]: self._logprob(chosen[0], chosen[1], entry.rank, context)}
        ranks = entry.ranks or range(1, len(others) + 1)
        for rank, (token_id, logprob) in zip(ranks, others, strict=True):
            position.setdefault(token_id, self._logprob(token_id, logprob, rank, context))
        return position

    def _logprob(self, token_id: int, logprob: float, rank: int, context: Sequence[int]) -> Logprob:
        return Logprob(logprob, rank, self._text(token_id, context))

    def _text(self, token_id: int, context: Sequence[int]) -> str | None:
        """The token's own text; for the last part of a character the whole of it, for the parts
        before an empty string.
        """
        if self._tokenizer is None:
            return None
        text = self._tokenizer.decode_token(token_id)
        if not text.endswith(_REPLACEMENT):
            return text
        for length in range(1, min(_MAX_CONTEXT, len(context)) + 1):
            before = list(context[-length:])
            whole = self._tokenizer.decode([*before, token_id])
            if not whole.endswith(_REPLACEMENT):
                return whole.removeprefix(self._tokenizer.decode(before).rstrip(_REPLACEMENT))
        return ""
