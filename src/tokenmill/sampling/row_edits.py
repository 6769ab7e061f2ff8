"""What rows ask of their logits, kept by row: each state makes one of the edits of `edits.py`.

A state costs a step nothing in which no row asks for it: `row_params.py` knows who does. A new one
is a class here and a line in `row_edits`; its place in that list is its place in the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.contracts.logits_processor import LogitsProcessor
from tokenmill.contracts.plan import NewRequestData
from tokenmill.sampling.edits import (
    AllowedTokens,
    BadWords,
    BannedTokens,
    BeforeSample,
    BiasedTokens,
    CustomEdits,
    ForcedTokens,
    LogitsEdit,
    Penalties,
    RowFunction,
)
from tokenmill.sampling.metadata import IntArray
from tokenmill.sampling_params import SamplingParams
from tokenmill.tokenizer.reasoning import ReasoningMarkers


class RowEdits(Protocol):
    """What rows ask for. A row's entry stays until another request enters it."""

    def set_row(self, row: int, request: NewRequestData) -> bool:
        """Fill a row for the request that enters it; whether it asks for anything."""
        ...

    def gather(self, before: BeforeSample) -> LogitsEdit | None:
        """The edit of some logits rows, all of requests that ask; None if nothing is to be done."""
        ...


def row_edits(
    max_num_seqs: int, vocab_size: int, processors: Sequence[LogitsProcessor] = ()
) -> list[RowEdits]:
    """All of them, in the order in which logits are edited."""
    return [
        AllowedTokenRows(vocab_size),
        BadWordRows(),
        MinTokensRows(max_num_seqs, vocab_size),
        BiasRows(),
        CustomRows(processors),
        PenaltyRows(max_num_seqs),
        ThinkingRows(max_num_seqs),
    ]


class AllowedTokenRows:
    """`allowed_token_ids`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._by_row: dict[int, tuple[IntArray, npt.NDArray[np.int32]]] = {}

    def set_row(self, row: int, request: NewRequestData) -> bool:
        self._by_row.pop(row, None)
        allowed = request.sampling_params.allowed_token_ids
        if allowed is None:
            return False
        ids = np.array(allowed, np.int64)
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.bool_)
        bits[ids] = True
        words = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        self._by_row[row] = ids, words
        return True

    def gather(self, before: BeforeSample) -> AllowedTokens:
        found = [self._by_row[row] for row in before.table_rows.tolist()]
        return AllowedTokens(
            before.logits_rows, [ids for ids, _ in found], [words for _, words in found]
        )


class BadWordRows:
    """`bad_words`."""

    def __init__(self) -> None:
        self._by_row: dict[int, tuple[npt.NDArray[np.int32], IntArray]] = {}

    def set_row(self, row: int, request: NewRequestData) -> bool:
        self._by_row.pop(row, None)
        words = request.token_rules.bad_words if request.token_rules is not None else []
        if not words:
            return False
        prefixes = np.full((len(words), max(map(len, words)) - 1), -1, np.int32)
        for prefix, word in zip(prefixes, words, strict=True):
            prefix[len(prefix) - len(word) + 1 :] = word[:-1]
        self._by_row[row] = prefixes, np.array([word[-1] for word in words], np.int64)
        return True

    def gather(self, before: BeforeSample) -> BadWords:
        found = [self._by_row[row] for row in before.table_rows.tolist()]
        counts = [len(last_ids) for _, last_ids in found]
        longest = max(prefixes.shape[1] for prefixes, _ in found)
        merged = np.full((sum(counts), longest), -1, np.int32)
        start = 0
        for prefixes, _ in found:
            end = start + len(prefixes)
            merged[start:end, longest - prefixes.shape[1] :] = prefixes
            start = end
        return BadWords(
            before.take(np.repeat(np.arange(len(found)), counts)),
            merged,
            np.concatenate([last_ids for _, last_ids in found]),
        )


class MinTokensRows:
    """`min_tokens`: every id that could end a request is banned while its output is too short."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._min_tokens = np.zeros(max_num_seqs, np.int64)
        self._ids: dict[int, IntArray] = {}

    def set_row(self, row: int, request: NewRequestData) -> bool:
        self._ids.pop(row, None)
        ids = np.array(request.stop_token_ids, np.int64)
        ids = ids[ids < self._vocab_size]
        self._min_tokens[row] = request.sampling_params.min_tokens
        if not self._min_tokens[row] or not ids.size:
            return False
        self._ids[row] = ids
        return True

    def gather(self, before: BeforeSample) -> BannedTokens | None:
        num_output = before.positions - before.num_prompt_tokens
        short = np.flatnonzero(num_output < self._min_tokens[before.table_rows])
        if not short.size:
            return None
        ids = [self._ids[row] for row in before.table_rows[short].tolist()]
        rows = np.repeat(before.logits_rows[short], [len(each) for each in ids])
        return BannedTokens(rows, np.concatenate(ids))


class BiasRows:
    """`logit_bias`."""

    def __init__(self) -> None:
        self._by_row: dict[int, tuple[IntArray, npt.NDArray[np.float32]]] = {}

    def set_row(self, row: int, request: NewRequestData) -> bool:
        self._by_row.pop(row, None)
        bias = request.sampling_params.logit_bias
        if bias is None:
            return False
        self._by_row[row] = (
            np.array(list(bias), np.int64),
            np.array(list(bias.values()), np.float32),
        )
        return True

    def gather(self, before: BeforeSample) -> BiasedTokens:
        found = [self._by_row[row] for row in before.table_rows.tolist()]
        return BiasedTokens(
            np.repeat(before.logits_rows, [len(ids) for ids, _ in found]),
            np.concatenate([ids for ids, _ in found]),
            np.concatenate([bias for _, bias in found]),
        )


class CustomRows:
    """What the operator's own processors make of a request."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = processors
        self._by_row: dict[int, list[RowFunction]] = {}

    def set_row(self, row: int, request: NewRequestData) -> bool:
        self._by_row.pop(row, None)
        made = [_function(processor, request.sampling_params) for processor in self._processors]
        functions = [function for function in made if function is not None]
        if not functions:
            return False
        self._by_row[row] = functions
        return True

    def gather(self, before: BeforeSample) -> CustomEdits:
        return CustomEdits(before, [self._by_row[row] for row in before.table_rows.tolist()])


def _function(processor: LogitsProcessor, params: SamplingParams) -> RowFunction | None:
    """A processor's edit for one request. If it fails already here, the edit fails in its place:
    there it stops that request only.
    """
    try:
        return processor.for_request(params)
    except Exception as error:  # noqa: BLE001 - a stranger's code
        reason = f"{type(processor).__name__}.for_request: {type(error).__name__}: {error}"

    def fail(prompt_ids: torch.Tensor, output_ids: torch.Tensor, logits: torch.Tensor) -> None:
        raise RuntimeError(reason)

    return fail


class PenaltyRows:
    """`repetition_penalty`, `frequency_penalty`, `presence_penalty`."""

    def __init__(self, max_num_seqs: int) -> None:
        self._repetition = np.ones(max_num_seqs, np.float32)
        self._frequency = np.zeros(max_num_seqs, np.float32)
        self._presence = np.zeros(max_num_seqs, np.float32)

    def set_row(self, row: int, request: NewRequestData) -> bool:
        params = request.sampling_params
        self._repetition[row] = params.repetition_penalty
        self._frequency[row] = params.frequency_penalty
        self._presence[row] = params.presence_penalty
        return (
            params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0
        )

    def gather(self, before: BeforeSample) -> Penalties:
        rows = before.table_rows
        return Penalties(
            before, self._repetition[rows], self._frequency[rows], self._presence[rows]
        )


class ThinkingRows:
    """`thinking_token_budget`."""

    def __init__(self, max_num_seqs: int) -> None:
        self._budget = np.zeros(max_num_seqs, np.int64)
        self._is_open = np.zeros(max_num_seqs, np.bool_)
        self._markers: ReasoningMarkers | None = None
        """One model's, so the same for all rows."""

    def set_row(self, row: int, request: NewRequestData) -> bool:
        budget = request.sampling_params.thinking_token_budget
        markers = request.token_rules.reasoning if request.token_rules is not None else None
        if budget is None or markers is None:
            return False
        prompt = request.token_ids[: request.num_prompt_tokens]
        self._budget[row] = budget
        self._is_open[row] = markers.open_after(prompt) is True
        assert self._markers in (None, markers), "an engine has one model"
        self._markers = markers
        return True

    def gather(self, before: BeforeSample) -> ForcedTokens:
        assert self._markers is not None, "a row asks"
        rows = before.table_rows
        return ForcedTokens(
            before,
            self._budget[rows],
            self._is_open[rows],
            self._markers.start_ids,
            self._markers.end_ids,
        )
