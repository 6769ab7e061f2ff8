"""Steps of a model that shares the host's memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.sampling.sampler import Samples
from tokenmill.worker.batch import BatchShape, BatchTensors, InputBatch, IntArray, NewTokens, runs
from tokenmill.worker.rows import RowTable


class HostInputs:
    """Rows, and the memory of every step's batch, allocated once at its largest shape."""

    def __init__(self, rows: RowTable, max_num_batched_tokens: int) -> None:
        self.rows = rows
        max_num_seqs = len(rows.num_tokens)
        num_groups = len(rows.block_tables)
        self._query_start_loc = np.zeros(max_num_seqs + 1, np.int32)
        self._seq_lens = np.zeros(max_num_seqs, np.int32)
        self._input_ids = np.zeros(max_num_batched_tokens, np.int32)
        self._positions = np.zeros(max_num_batched_tokens, np.int64)
        self._block_tables = [
            np.zeros((max_num_seqs, rows.max_num_blocks), np.int32) for _ in range(num_groups)
        ]
        self._slot_mappings = [
            np.zeros(max_num_batched_tokens, np.int64) for _ in range(num_groups)
        ]

    def update(self, plan: SchedulerOutput) -> None:
        """Apply a plan's differences to the rows."""
        self.rows.update(plan)

    def fill(self, batch: InputBatch, shape: BatchShape) -> BatchTensors:
        """The batch's tensors; recorded steps of the host need no padding."""
        assert shape == batch.shape
        num_blocks = -(-shape.max_seq_len // self.rows.block_size)
        self._query_start_loc[: batch.num_reqs + 1] = batch.query_start_loc
        self._seq_lens[: batch.num_reqs] = batch.seq_lens
        for buffer, group in zip(self._block_tables, self.rows.block_tables, strict=True):
            buffer[: batch.num_reqs, :num_blocks] = group.block_ids[batch.rows, :num_blocks]
        token_rows = np.repeat(batch.rows, batch.num_scheduled_tokens)
        positions = self._positions[: shape.num_tokens]
        positions[:] = runs(batch.num_computed_tokens, batch.num_scheduled_tokens)
        self._input_ids[: shape.num_tokens] = self.rows.token_ids[token_rows, positions]
        self._map_slots(token_rows, positions)
        return self._tensors(shape, num_blocks)

    def blank(self, shape: BatchShape) -> BatchTensors:
        """Tensors of a step of one request, at positions of the null block."""
        assert shape.num_reqs == 1
        self._positions[:] = 0
        self._query_start_loc[1] = 1
        self._seq_lens[0] = 1
        return self._tensors(shape, 1)

    def stage(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """The array itself."""
        return torch.from_numpy(array)

    def write_tokens(self, samples: Samples, new: NewTokens) -> None:
        """Put the new tokens into their rows."""
        self.rows.token_ids[new.rows, new.positions] = samples.to_host().token_ids[new.entries]

    def settle_tokens(self, token_ids: IntArray, new: NewTokens) -> None:
        """Nothing is left to tell: the rows are the host's."""

    def _map_slots(self, token_rows: IntArray, positions: IntArray) -> None:
        block_index, offset = np.divmod(positions, self.rows.block_size)
        for buffer, group in zip(self._slot_mappings, self.rows.block_tables, strict=True):
            slots = buffer[: len(positions)]
            slots[:] = group.block_ids[token_rows, block_index]
            slots *= self.rows.block_size
            slots += offset

    def _tensors(self, shape: BatchShape, num_blocks: int) -> BatchTensors:
        num_tokens, num_reqs = shape.num_tokens, shape.num_reqs
        return BatchTensors(
            shape=shape,
            input_ids=torch.from_numpy(self._input_ids[:num_tokens]),
            positions=torch.from_numpy(self._positions[:num_tokens]),
            query_start_loc=torch.from_numpy(self._query_start_loc[: num_reqs + 1]),
            seq_lens=torch.from_numpy(self._seq_lens[:num_reqs]),
            block_tables=tuple(
                torch.from_numpy(buffer[:num_reqs, :num_blocks]) for buffer in self._block_tables
            ),
            slot_mappings=tuple(
                torch.from_numpy(buffer[:num_tokens]) for buffer in self._slot_mappings
            ),
        )
