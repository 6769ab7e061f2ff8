"""The sampler: which token each logits row gives.

grammar mask
raw log-probabilities of the rows that ask
edits                       min_tokens, ...
greedy rows                 the best token, of equal ones the smallest id
random rows                 (logits - best) / temperature
  filters                   min_p, top-k, top-p
  logits + Gumbel noise     the best token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.contracts.request import TokenLogprobs
from tokenmill.sampling.logprobs import raw_logprobs, token_logprobs
from tokenmill.sampling.metadata import IntArray, RandomColumns, SamplingMetadata
from tokenmill.sampling.random import gumbel_noise, stream_keys
from tokenmill.sampling.transforms import CandidateFilter, LogitsEdit, MinP, MinTokens, TopK, TopP


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


class Sampler:
    """Chooses tokens from logits. Has no state: all randomness comes from seed and position."""

    def __init__(
        self,
        edits: Sequence[LogitsEdit] = (MinTokens(),),
        filters: Sequence[CandidateFilter] = (MinP(), TopK(), TopP()),
    ) -> None:
        self._edits = edits
        self._filters = filters

    def forward(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Sample one token from each row of float32 logits [n, vocab_size], which are edited."""
        metadata.grammar.apply(logits)
        asked = np.flatnonzero(metadata.wants_logprobs)
        logprobs = raw_logprobs(logits[torch.from_numpy(asked)])
        for edit in self._edits:
            edit.apply(logits, metadata)
        best, greedy_ids = logits.max(-1)
        is_valid = best.isfinite().numpy()
        token_ids = greedy_ids.numpy()
        drawn = np.flatnonzero(is_valid & ~metadata.is_greedy)
        token_ids[drawn] = self._draw(logits, best, metadata.random, drawn)
        return SamplerOutput(
            token_ids=token_ids,
            is_valid=is_valid,
            logprobs={
                row: token_logprobs(values, int(token_ids[row]), int(metadata.num_logprobs[row]))
                for row, values in zip(asked.tolist(), logprobs, strict=True)
            },
        )

    def _draw(
        self, logits: torch.Tensor, best: torch.Tensor, columns: RandomColumns, drawn: IntArray
    ) -> IntArray:
        """A random token of each of the logits rows `drawn`, [len(drawn)]."""
        rows = torch.from_numpy(drawn)
        columns = columns.take(drawn)
        temperature = torch.from_numpy(columns.temperature).unsqueeze(1)
        scaled = (logits[rows] - best[rows].unsqueeze(1)) / temperature
        for candidate_filter in self._filters:
            candidate_filter.apply(scaled, columns)
        keys = stream_keys(columns.seed, columns.position)
        token_ids = np.empty(len(drawn), np.int64)
        for i, row_logits in enumerate(scaled.numpy()):
            candidates = np.flatnonzero(row_logits > -np.inf)
            noisy = row_logits[candidates] + gumbel_noise(keys[i], candidates)
            token_ids[i] = candidates[np.argmax(noisy)]
        return token_ids
