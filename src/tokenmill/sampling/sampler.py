"""The sampler: which token each logits row gives.

grammar mask
raw log-probabilities of the rows that ask
edits                       allowed ids, bad words, min_tokens, biases, custom processors,
                            penalties, the end of reasoning: `edits.py`
greedy rows                 the best token, of equal ones the smallest id
random rows                 (logits - best) / temperature
  filters                   min_p, top-k, top-p
  logits + Gumbel noise     the best token
processed log-probabilities, if the engine gives these
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.contracts.request import TokenLogprobs
from tokenmill.sampling.choosers import TokenChooser, token_chooser
from tokenmill.sampling.logprobs import LogprobsMode, TokenScorer, token_scorer
from tokenmill.sampling.metadata import IntArray, SamplingMetadata


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One entry a logits row, [n]."""

    token_ids: IntArray
    """Arbitrary where `is_valid` is not set."""
    is_valid: npt.NDArray[np.bool_]
    """Whether the row has a best logit: false if it holds a NaN or an infinity, or if every token
    is banned."""
    logprobs: dict[int, TokenLogprobs]
    """By logits row, of the rows that asked."""

    def to_host(self) -> SamplerOutput:
        """Itself: it is there."""
        return self


class Samples(Protocol):
    """A step's sampled tokens, perhaps still on their way from a device."""

    def to_host(self) -> SamplerOutput:
        """Wait for them."""
        ...


class DeviceSamples(Samples, Protocol):
    """Sampled tokens that the next step can read on the device before the host has seen them."""

    token_ids: torch.Tensor
    """int32 or int64 [n]; arbitrary, but valid ids where the row has no best logit"""


class TokenSampler(Protocol):
    """Chooses tokens from logits. Has no state: all randomness comes from seed and position."""

    def warm_up(self) -> None:
        """Make ready for the first step, whatever it asks for."""
        ...

    def forward(self, logits: torch.Tensor, metadata: SamplingMetadata) -> Samples:
        """Sample one token from each row of float32 logits [n, vocab_size], which are edited."""
        ...

    def score(
        self, logits: torch.Tensor, token_ids: IntArray, num_best: IntArray
    ) -> tuple[list[TokenLogprobs], list[bool]]:
        """Raw log-probabilities of given tokens, one a row, and whether each row is finite.

        Beside `token_ids[i]`, the `num_best[i]` best tokens of row i are listed.
        """
        ...


class Sampler:
    """The host's sampler."""

    def __init__(
        self,
        chooser: TokenChooser | None = None,
        scorer: TokenScorer | None = None,
        mode: LogprobsMode | None = None,
    ) -> None:
        self._chooser = chooser or token_chooser()
        self._scorer = scorer or token_scorer()
        self._mode = mode or LogprobsMode()

    def warm_up(self) -> None:
        """It is ready."""

    def forward(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Sample one token from each row of float32 logits [n, vocab_size], which are edited."""
        metadata.grammar.apply(logits)
        asked = np.flatnonzero(metadata.wants_logprobs)
        scored: torch.Tensor | None = None
        if asked.size and not self._mode.is_processed:
            scored = logits[torch.from_numpy(asked)]
        for edit in metadata.edits:
            edit.apply(logits, metadata.token_ids)
        token_ids, is_valid = self._chooser.choose(logits, metadata)
        if asked.size and self._mode.is_processed:
            rows, columns = logits[torch.from_numpy(asked)], metadata.random.take(asked)
            scored = self._chooser.filtered(rows, metadata.is_greedy[asked], columns)
        logprobs: dict[int, TokenLogprobs] = {}
        if scored is not None:
            entries, _ = self.score(scored, token_ids[asked], metadata.num_logprobs[asked])
            for i, row in enumerate(asked.tolist()):
                listed = metadata.listed_ids.get(row)
                logprobs[row] = (
                    entries[i] if listed is None else self._with(entries[i], scored[i], listed)
                )
        return SamplerOutput(token_ids, is_valid, logprobs)

    def score(
        self, logits: torch.Tensor, token_ids: IntArray, num_best: IntArray
    ) -> tuple[list[TokenLogprobs], list[bool]]:
        """Raw log-probabilities of given tokens, one a row, and whether each row is finite."""
        entries, is_finite = self._scorer.score(logits, token_ids, num_best)
        if self._mode.are_logits:
            values = logits.numpy()
            for row, entry in zip(values, entries, strict=True):
                entry.logprobs = row[entry.token_ids].tolist()
        return entries, is_finite

    def _with(self, entry: TokenLogprobs, logits: torch.Tensor, listed: IntArray) -> TokenLogprobs:
        """A chosen token's entry with some ids behind it, of logits [vocab_size]."""
        many = logits.expand(len(listed), -1)  # the same memory, seen as so many rows
        others, _ = self.score(many, listed, np.zeros(len(listed), np.int64))
        return TokenLogprobs(
            [*entry.token_ids, *listed.tolist()],
            [*entry.logprobs, *(other.logprobs[0] for other in others)],
            entry.rank,
            [other.rank for other in others],
        )
