"""The last act of sampling: edited logits to one token a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.kernels import fused, native
from tokenmill.sampling.metadata import IntArray, RandomColumns, SamplingMetadata
from tokenmill.sampling.random import gumbel_noise, stream_keys
from tokenmill.sampling.transforms import CandidateFilter, MinP, TopK, TopP


class TokenChooser(Protocol):
    """Greedy rows take the best token, of equal ones the smallest id; others draw one."""

    def choose(
        self, logits: torch.Tensor, metadata: SamplingMetadata
    ) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Token ids [n], and whether the row has a finite best logit, for float32 logits
        [n, vocab_size]; an id without one is arbitrary.
        """
        ...

    def filtered(
        self, logits: torch.Tensor, is_greedy: npt.NDArray[np.bool_], columns: RandomColumns
    ) -> torch.Tensor:
        """What tokens are drawn from: logits / temperature, and -inf where a filter drops one, as
        a new tensor. Greedy rows stay as they are, and so do those without a finite best logit.
        """
        ...


class TorchChooser:
    """The plain way: what the native one is compared with."""

    def __init__(self, filters: Sequence[CandidateFilter] = (MinP(), TopK(), TopP())) -> None:
        self._filters = filters

    def choose(
        self, logits: torch.Tensor, metadata: SamplingMetadata
    ) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        best, greedy_ids = logits.max(-1)
        is_valid = best.isfinite().numpy()
        token_ids = greedy_ids.numpy()
        drawn = np.flatnonzero(is_valid & ~metadata.is_greedy)
        token_ids[drawn] = self._draw(logits, best, metadata.random, drawn)
        return token_ids, is_valid

    def _draw(
        self, logits: torch.Tensor, best: torch.Tensor, columns: RandomColumns, drawn: IntArray
    ) -> IntArray:
        """A random token of each of the logits rows `drawn`, [len(drawn)]."""
        columns = columns.take(drawn)
        scaled = self._scaled(logits, best, columns, torch.from_numpy(drawn))
        keys = stream_keys(columns.seed, columns.position)
        token_ids = np.empty(len(drawn), np.int64)
        for i, row_logits in enumerate(scaled.numpy()):
            candidates = np.flatnonzero(row_logits > -np.inf)
            noisy = row_logits[candidates] + gumbel_noise(keys[i], candidates)
            token_ids[i] = candidates[np.argmax(noisy)]
        return token_ids

    def filtered(
        self, logits: torch.Tensor, is_greedy: npt.NDArray[np.bool_], columns: RandomColumns
    ) -> torch.Tensor:
        best, out = logits.amax(-1), logits.clone()
        drawn = np.flatnonzero(best.isfinite().numpy() & ~is_greedy)
        rows, columns = torch.from_numpy(drawn), columns.take(drawn)
        scaled = self._scaled(logits, best, columns, rows)
        divided = logits[rows] / torch.from_numpy(columns.temperature).unsqueeze(1)
        out[rows] = divided.masked_fill_(scaled == -torch.inf, -torch.inf)
        return out

    def _scaled(
        self, logits: torch.Tensor, best: torch.Tensor, columns: RandomColumns, rows: torch.Tensor
    ) -> torch.Tensor:
        """Some rows with their maximum at 0, divided by the temperature and filtered; the columns
        are those of these rows.
        """
        temperature = torch.from_numpy(columns.temperature).unsqueeze(1)
        scaled = (logits[rows] - best[rows].unsqueeze(1)) / temperature
        for candidate_filter in self._filters:
            candidate_filter.apply(scaled, columns)
        return scaled


class NativeChooser:
    """One native call, without a sort of the vocabulary."""

    def choose(
        self, logits: torch.Tensor, metadata: SamplingMetadata
    ) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        columns = metadata.random
        return fused.sample(
            logits,
            is_greedy=metadata.is_greedy,
            temperature=columns.temperature,
            min_p=columns.min_p,
            top_k=columns.top_k,
            top_p=columns.top_p,
            seed=columns.seed,
            position=columns.position,
        )

    def filtered(
        self, logits: torch.Tensor, is_greedy: npt.NDArray[np.bool_], columns: RandomColumns
    ) -> torch.Tensor:
        out = torch.empty_like(logits)
        native.module().filter_logits(
            logits,
            is_greedy,
            columns.temperature,
            columns.min_p,
            columns.top_k,
            columns.top_p,
            out,
        )
        return out


def token_chooser() -> TokenChooser:
    """The native one where it can be had."""
    return NativeChooser() if native.is_available() else TorchChooser()
