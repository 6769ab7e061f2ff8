"""What each row asks of the sampler, kept as columns so that a step gathers them at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenmill.contracts.plan import NewRequestData
from tokenmill.sampling.grammar_mask import GrammarMask
from tokenmill.sampling.metadata import IntArray, RandomColumns, SamplingMetadata
from tokenmill.sampling_params import ALL_LOGPROBS


class RowSamplingParams:
    """Sampling parameters by row. A row's entries stay until another request enters it."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
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
        self._min_tokens = np.zeros(max_num_seqs, np.int64)
        self._stop_token_ids = [np.empty(0, np.int64)] * max_num_seqs
        self.num_prompt_logprobs = np.zeros(max_num_seqs, np.int64)
        """Best tokens to list at each prompt position, for rows whose plan has logits there."""

    def set_row(self, row: int, request: NewRequestData) -> None:
        """Fill a row for the request that enters it."""
        params = request.sampling_params
        columns = self._columns
        self._is_greedy[row] = params.greedy
        columns.temperature[row] = params.temperature
        columns.top_k[row] = 0 if params.top_k >= self._vocab_size else params.top_k
        columns.top_p[row] = params.top_p
        columns.min_p[row] = params.min_p
        columns.seed[row] = request.seed % 2**64
        self._wants_logprobs[row] = params.logprobs is not None
        self._num_logprobs[row] = self._count_best(params.logprobs)
        self.num_prompt_logprobs[row] = self._count_best(params.prompt_logprobs)
        self._min_tokens[row] = params.min_tokens
        stop_ids = np.array(request.stop_token_ids, np.int64)
        self._stop_token_ids[row] = stop_ids[stop_ids < self._vocab_size]

    def gather(
        self,
        rows: IntArray,
        positions: IntArray,
        num_output_tokens: IntArray,
        grammar: GrammarMask,
    ) -> SamplingMetadata:
        """The metadata of some logits rows; all arrays are [n].

        `rows` says whose logits they are, `positions` where in the sequence the sampled token will
        stand, `num_output_tokens` how many generated tokens stand before it.
        """
        columns = self._columns
        short = np.flatnonzero(num_output_tokens < self._min_tokens[rows])
        return SamplingMetadata(
            is_greedy=self._is_greedy[rows],
            random=RandomColumns(
                temperature=columns.temperature[rows],
                top_k=columns.top_k[rows],
                top_p=columns.top_p[rows],
                min_p=columns.min_p[rows],
                seed=columns.seed[rows],
                position=positions,
            ),
            wants_logprobs=self._wants_logprobs[rows],
            num_logprobs=self._num_logprobs[rows],
            banned_token_ids={i: self._stop_token_ids[rows[i]] for i in short.tolist()},
            grammar=grammar,
        )

    def wants_logprobs(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Which of `rows` ask for log-probabilities of their generated tokens."""
        return self._wants_logprobs[rows]

    def _count_best(self, asked: int | None) -> int:
        if asked is None:
            return 0
        return self._vocab_size if asked == ALL_LOGPROBS else min(asked, self._vocab_size)
