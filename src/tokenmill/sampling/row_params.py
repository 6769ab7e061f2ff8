"""What each row asks of the sampler, kept as columns so that a step gathers them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.contracts.logits_processor import LogitsProcessor
from tokenmill.contracts.plan import NewRequestData
from tokenmill.sampling.edits import BeforeSample, LogitsEdit
from tokenmill.sampling.grammar_mask import GrammarMask
from tokenmill.sampling.metadata import IntArray, RandomColumns, SamplingMetadata
from tokenmill.sampling.row_edits import RowEdits, row_edits
from tokenmill.sampling_params import ALL_LOGPROBS


@dataclass(frozen=True, slots=True)
class _Columns:
    """The parameters of some rows, gathered; positions are not in use."""

    is_greedy: npt.NDArray[np.bool_]
    random: RandomColumns
    wants_logprobs: npt.NDArray[np.bool_]
    num_logprobs: IntArray
    listed_ids: dict[int, IntArray]
    asking: list[tuple[RowEdits, IntArray]]
    """Edits that some of the rows ask for, and which do."""


@dataclass(frozen=True, slots=True)
class ParamTable:
    """What all rows ask for; every array is [max_num_seqs]."""

    is_plain: npt.NDArray[np.bool_]
    """Whether a row wants nothing but tokens: no logits edited, no log-probabilities."""
    is_greedy: npt.NDArray[np.bool_]
    random: RandomColumns
    """Positions are not in use."""


class RowSamplingParams:
    """Sampling parameters by row. A row's entries stay until another request enters it."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        """`processors` are the operator's own."""
        self._vocab_size = vocab_size
        self._is_greedy = np.zeros(max_num_seqs, np.bool_)
        self._columns = RandomColumns(
            temperature=np.zeros(max_num_seqs, np.float32),
            top_k=np.zeros(max_num_seqs, np.int64),
            top_p=np.ones(max_num_seqs, np.float64),
            min_p=np.zeros(max_num_seqs, np.float32),
            seed=np.zeros(max_num_seqs, np.uint64),
            position=np.zeros(max_num_seqs, np.int64),
        )
        self._wants_logprobs = np.zeros(max_num_seqs, np.bool_)
        self._num_logprobs = np.zeros(max_num_seqs, np.int64)
        self._listed_ids: dict[int, IntArray] = {}
        self._edits = row_edits(max_num_seqs, vocab_size, processors)
        self._asks = np.zeros((len(self._edits), max_num_seqs), np.bool_)
        """Which rows ask for which edits."""
        self._is_plain = np.zeros(max_num_seqs, np.bool_)
        self._last: tuple[bytes, _Columns] | None = None
        """Of the step before, by the bytes of its rows; forgotten when a row changes."""
        self.num_prompt_logprobs = np.zeros(max_num_seqs, np.int64)
        """Best tokens to list at each prompt position, for rows whose plan has logits there."""

    def set_row(self, row: int, request: NewRequestData) -> None:
        """Fill a row for the request that enters it."""
        params = request.sampling_params
        columns = self._columns
        self._last = None
        self._is_greedy[row] = params.greedy
        columns.temperature[row] = params.temperature
        columns.top_k[row] = 0 if params.top_k >= self._vocab_size else params.top_k
        columns.top_p[row] = params.top_p
        columns.min_p[row] = params.min_p
        columns.seed[row] = request.seed % 2**64
        self._wants_logprobs[row] = params.logprobs is not None
        self._num_logprobs[row] = self._count_best(params.logprobs)
        self._listed_ids.pop(row, None)
        if params.logprob_token_ids is not None:
            self._num_logprobs[row] = 0
            self._listed_ids[row] = np.array(params.logprob_token_ids, np.int64)
        self.num_prompt_logprobs[row] = self._count_best(params.prompt_logprobs)
        for asks, edits in zip(self._asks, self._edits, strict=True):
            asks[row] = edits.set_row(row, request)
        self._is_plain[row] = not (self._wants_logprobs[row] or self._asks[:, row].any())

    @property
    def table(self) -> ParamTable:
        """The parameters of all rows, for who reads them by row; they keep their places."""
        return ParamTable(self._is_plain, self._is_greedy, self._columns)

    def gather(
        self,
        rows: IntArray,
        positions: IntArray,
        num_prompt_tokens: IntArray,
        token_ids: torch.Tensor,
        grammar: GrammarMask,
    ) -> SamplingMetadata:
        """The metadata of some logits rows.

        `rows` [n] says whose logits they are, `positions` [n] where in the sequence the sampled
        token will stand; `num_prompt_tokens` is [max_num_seqs], by row. `token_ids`, int32
        [max_num_seqs, max_len], has the rows' tokens where the logits are.
        """
        asked = self._columns_of(rows)
        columns = asked.random
        return SamplingMetadata(
            is_greedy=asked.is_greedy,
            random=RandomColumns(
                temperature=columns.temperature,
                top_k=columns.top_k,
                top_p=columns.top_p,
                min_p=columns.min_p,
                seed=columns.seed,
                position=positions,
            ),
            wants_logprobs=asked.wants_logprobs,
            num_logprobs=asked.num_logprobs,
            listed_ids=asked.listed_ids,
            edits=_gather_edits(asked.asking, rows, positions, num_prompt_tokens)
            if asked.asking
            else (),
            token_ids=token_ids,
            grammar=grammar,
        )

    def _columns_of(self, rows: IntArray) -> _Columns:
        """What these rows ask for; mostly the same rows as in the step before."""
        key = rows.tobytes()
        if self._last is None or self._last[0] != key:
            columns, asks = self._columns, self._asks[:, rows]
            self._last = (
                key,
                _Columns(
                    is_greedy=self._is_greedy[rows],
                    random=columns.take(rows),
                    wants_logprobs=self._wants_logprobs[rows],
                    num_logprobs=self._num_logprobs[rows],
                    listed_ids=self._listed(rows),
                    asking=[
                        (self._edits[i], np.flatnonzero(asks[i]))
                        for i in np.flatnonzero(asks.any(1)).tolist()
                    ],
                ),
            )
        return self._last[1]

    def _listed(self, rows: IntArray) -> dict[int, IntArray]:
        if not self._listed_ids:
            return {}
        found = enumerate(map(self._listed_ids.get, rows.tolist()))
        return {i: ids for i, ids in found if ids is not None}

    def wants_logprobs(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Which of `rows` ask for log-probabilities of their generated tokens."""
        return self._wants_logprobs[rows]

    def _count_best(self, asked: int | None) -> int:
        if asked is None:
            return 0
        return self._vocab_size if asked == ALL_LOGPROBS else min(asked, self._vocab_size)


def _gather_edits(
    asking: list[tuple[RowEdits, IntArray]],
    rows: IntArray,
    positions: IntArray,
    num_prompt_tokens: IntArray,
) -> tuple[LogitsEdit, ...]:
    """What these rows ask for, in its order."""
    before = BeforeSample(np.arange(len(rows)), rows, positions, num_prompt_tokens[rows])
    gathered = [edits.gather(before.take(indices)) for edits, indices in asking]
    return tuple(edit for edit in gathered if edit is not None)
