"""Gathering a step's inputs from the rows' tables: numpy's way, and the same in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.kernels import native

Ids = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Tables of the rows and buffers of a step; they keep their places. One table, one buffer each
    for every KV cache group.
    """

    token_ids: Ids
    """[max_num_seqs, max_model_len]"""
    block_ids: Sequence[Ids]
    """[max_num_seqs, max_blocks]"""
    block_size: int
    query_start_loc: Ids
    """[max_num_seqs + 1]"""
    seq_lens: Ids
    """[max_num_seqs]"""
    input_ids: Ids
    """[max_num_batched_tokens]"""
    positions: Numbers
    """[max_num_batched_tokens]"""
    block_tables: Sequence[Ids]
    """[max_num_seqs, max_blocks]"""
    slot_mappings: Sequence[Numbers]
    """[max_num_batched_tokens]"""
    position_offsets: Numbers | None = None
    """[max_num_seqs], what a row's positions are greater by than its tokens' places; None adds
    nothing."""


class StepGather(Protocol):
    """Fills the buffers of a step."""

    def fill(self, rows: Numbers, counts: Numbers, num_computed: Numbers) -> None:
        """Gather counts[i] tokens of rows[i] behind the num_computed[i] that are computed; all are
        int64 [num_reqs]. What lies behind a request's blocks in a block table stays as it is.
        """
        ...


def step_gather(arrays: StepArrays) -> StepGather:
    """The native way where it can be had."""
    if not native.is_available():
        return NumpyStepGather(arrays)
    gather: StepGather = native.module().StepGather(
        arrays.token_ids,
        list(arrays.block_ids),
        arrays.block_size,
        arrays.query_start_loc,
        arrays.seq_lens,
        arrays.input_ids,
        arrays.positions,
        list(arrays.block_tables),
        list(arrays.slot_mappings),
        arrays.position_offsets,
    )
    return gather


class NumpyStepGather:
    """The reference."""

    def __init__(self, arrays: StepArrays) -> None:
        self._arrays = arrays

    def fill(self, rows: Numbers, counts: Numbers, num_computed: Numbers) -> None:
        arrays = self._arrays
        num_reqs, ends = len(rows), num_computed + counts
        np.cumsum(counts, out=arrays.query_start_loc[1 : num_reqs + 1])
        arrays.seq_lens[:num_reqs] = ends
        starts = arrays.query_start_loc[:num_reqs]
        num_tokens = int(counts.sum())
        token_rows = np.repeat(rows, counts)
        places = np.arange(num_tokens) + np.repeat(num_computed - starts, counts)
        arrays.positions[:num_tokens] = places
        if arrays.position_offsets is not None:
            arrays.positions[:num_tokens] += arrays.position_offsets[token_rows]
        arrays.input_ids[:num_tokens] = arrays.token_ids[token_rows, places]
        num_blocks = -(-int(ends.max()) // arrays.block_size)
        index, offset = np.divmod(places, arrays.block_size)
        for block_ids, block_table, slots in zip(
            arrays.block_ids, arrays.block_tables, arrays.slot_mappings, strict=True
        ):
            block_table[:num_reqs, :num_blocks] = block_ids[rows, :num_blocks]
            slots[:num_tokens] = block_ids[token_rows, index]
            slots[:num_tokens] *= arrays.block_size
            slots[:num_tokens] += offset
