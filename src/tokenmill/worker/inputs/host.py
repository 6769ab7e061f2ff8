"""Steps of a model that shares the host's memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.kernels.step_gather import StepArrays, StepGather, step_gather
from tokenmill.sampling.sampler import Samples
from tokenmill.worker.batch import BatchShape, BatchTensors, InputBatch, IntArray, NewTokens
from tokenmill.worker.rows import RowTable


class HostInputs:
    """Rows, and the memory of every step's batch, allocated once at its largest shape."""

    def __init__(
        self,
        rows: RowTable,
        max_num_batched_tokens: int,
        position_offsets: IntArray | None = None,
    ) -> None:
        """`position_offsets` as in `StepArrays`; they may be changed between steps."""
        self.rows = rows
        self.token_ids = torch.from_numpy(rows.token_ids)
        max_num_seqs = len(rows.num_tokens)
        groups = rows.block_tables
        self._arrays = StepArrays(
            token_ids=rows.token_ids,
            block_ids=[group.block_ids for group in groups],
            block_size=rows.block_size,
            query_start_loc=np.zeros(max_num_seqs + 1, np.int32),
            seq_lens=np.zeros(max_num_seqs, np.int32),
            input_ids=np.zeros(max_num_batched_tokens, np.int32),
            positions=np.zeros(max_num_batched_tokens, np.int64),
            block_tables=[np.zeros((max_num_seqs, rows.max_num_blocks), np.int32) for _ in groups],
            slot_mappings=[np.zeros(max_num_batched_tokens, np.int64) for _ in groups],
            position_offsets=position_offsets,
        )
        self._gather = step_gather(self._arrays)
        self._last: tuple[tuple[int, int, int], BatchTensors] | None = None

    @property
    def gather(self) -> StepGather:
        """Fills the buffers of a step from the rows."""
        return self._gather

    def update(self, plan: SchedulerOutput) -> None:
        """Apply a plan's differences to the rows."""
        self.rows.update(plan)

    def are_text(self, plan: SchedulerOutput) -> bool:
        """Whether `gather` is all that a step of this plan needs."""
        return True

    def fill(self, batch: InputBatch, shape: BatchShape) -> BatchTensors:
        """The batch's tensors; recorded steps of the host need no padding."""
        self._gather.fill(batch.rows, batch.num_scheduled_tokens, batch.num_computed_tokens)
        return self._tensors(shape, -(-shape.max_seq_len // self.rows.block_size))

    def blank(self, shape: BatchShape) -> BatchTensors:
        """Tensors of a step of one request, at positions of the null block."""
        assert shape.num_reqs == 1
        self._arrays.positions[:] = 0
        self._arrays.query_start_loc[1] = 1
        self._arrays.seq_lens[0] = 1
        return self._tensors(shape, 1)

    def warm_up(self) -> None:
        """It is ready."""

    def stage(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """The array itself."""
        return torch.from_numpy(array)

    def write_tokens(self, samples: Samples, new: NewTokens) -> None:
        """Put the new tokens into their rows."""
        self.rows.token_ids[new.rows, new.positions] = samples.to_host().token_ids[new.entries]

    def settle_tokens(self, token_ids: IntArray, new: NewTokens) -> None:
        """Nothing is left to tell: the rows are the host's."""

    def _tensors(self, shape: BatchShape, num_blocks: int) -> BatchTensors:
        """Views of the buffers; a step mostly has those of the step before."""
        key = (shape.num_tokens, shape.num_reqs, num_blocks)
        if self._last is None or self._last[0] != key:
            self._last = (key, self._make_tensors(shape, num_blocks))
        return replace(self._last[1], shape=shape)

    def _make_tensors(self, shape: BatchShape, num_blocks: int) -> BatchTensors:
        arrays, num_tokens, num_reqs = self._arrays, shape.num_tokens, shape.num_reqs
        return BatchTensors(
            shape=shape,
            input_ids=torch.from_numpy(arrays.input_ids[:num_tokens]),
            positions=torch.from_numpy(arrays.positions[:num_tokens]),
            query_start_loc=torch.from_numpy(arrays.query_start_loc[: num_reqs + 1]),
            seq_lens=torch.from_numpy(arrays.seq_lens[:num_reqs]),
            block_tables=tuple(
                torch.from_numpy(table[:num_reqs, :num_blocks]) for table in arrays.block_tables
            ),
            slot_mappings=tuple(
                torch.from_numpy(slots[:num_tokens]) for slots in arrays.slot_mappings
            ),
        )
