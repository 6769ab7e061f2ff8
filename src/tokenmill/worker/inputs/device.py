"""Steps of a model on a GPU: the rows' tokens and block tables are mirrored there.

A step sends few numbers: which rows, how many tokens each, how long their sequences are. Kernels
gather ids, positions, slots and block tables from the mirror. Sampled ids are written into the
mirror by a kernel, too, so that the next step can be prepared before the host has seen them.

All tables lie in one tensor, so that a plan's differences are one copy and one kernel:

    | token ids [max_num_seqs, max_model_len] | block ids of a group [max_num_seqs, max_blocks] ...
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.kernels.gpu.inputs import gather_block_table, map_slots, prepare_step
from tokenmill.kernels.gpu.tables import commit_tokens, write_segments
from tokenmill.sampling.sampler import DeviceSamples, Samples
from tokenmill.worker.batch import (
    BatchShape,
    BatchTensors,
    DecodeBatch,
    InputBatch,
    IntArray,
    NewTokens,
)
from tokenmill.worker.inputs.staging import Staging
from tokenmill.worker.rows import RowTable

_MOST_SHAPES_KEPT = 1024


class DeviceInputs:
    """Rows on host and device, and the device's buffers of a step."""

    def __init__(
        self,
        rows: RowTable,
        max_num_batched_tokens: int,
        max_num_padded_reqs: int,
        staging: Staging,
        device: torch.device,
    ) -> None:
        """`max_num_padded_reqs` is the most requests of a padded step, no fewer than rows."""
        self.rows = rows
        self._staging = staging
        num_rows, max_len = rows.token_ids.shape
        num_groups, max_blocks = len(rows.block_tables), rows.max_num_blocks
        self._tables = torch.zeros(
            num_rows * (max_len + num_groups * max_blocks), dtype=torch.int32, device=device
        )
        self.token_ids = self._tables[: num_rows * max_len].view(num_rows, max_len)
        self._block_starts = [num_rows * (max_len + g * max_blocks) for g in range(num_groups)]
        self._block_ids = [
            self._tables[start : start + num_rows * max_blocks].view(num_rows, max_blocks)
            for start in self._block_starts
        ]
        self._input_ids = torch.zeros(max_num_batched_tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=device)
        self._slots = [torch.zeros_like(self._positions) for _ in range(num_groups)]
        self._step_numbers = torch.zeros(
            3 * max_num_padded_reqs + 1, dtype=torch.int32, device=device
        )
        self._query_start_loc = self._step_numbers[: max_num_padded_reqs + 1]
        self._seq_lens = self._step_numbers[max_num_padded_reqs + 1 : 2 * max_num_padded_reqs + 1]
        self._rows_of_reqs = self._step_numbers[2 * max_num_padded_reqs + 1 :]
        self._block_tables = [
            torch.zeros((max_num_padded_reqs, max_blocks), dtype=torch.int32, device=device)
            for _ in range(num_groups)
        ]
        self._by_shape: dict[BatchShape, BatchTensors] = {}
        self._decoding_rows: IntArray | None = None
        """Rows of the step filled last, if each of its requests computes one token."""

    def warm_up(self) -> None:
        """Compile the kernels that write the tables, which no blank step runs. Writes zeros over
        zeros.
        """
        self._write([0], [np.zeros(1, np.int32)])
        ids = torch.zeros(1, dtype=torch.int64, device=self._tables.device)
        nowhere: list[npt.NDArray[np.generic]] = [np.full(1, -1, np.int32), np.zeros(1, np.int64)]
        rows, positions = self._staging.stage(nowhere)
        commit_tokens(self.token_ids, rows, positions, ids)
        self._rows_of_reqs[:1].fill_(-1)
        commit_tokens(self.token_ids, self._rows_of_reqs[:1], self._seq_lens[:1], ids)

    def update(self, plan: SchedulerOutput) -> None:
        """Apply a plan's differences to the rows, here and on the device."""
        cached = plan.scheduled_cached_reqs
        first_new = [table.num_blocks[cached.rows] for table in self.rows.block_tables]
        self.rows.update(plan)
        starts: list[int] = []
        parts: list[npt.NDArray[np.int32]] = []
        for request in plan.scheduled_new_reqs:
            starts.append(request.row * self.token_ids.shape[1])
            parts.append(self.rows.token_ids[request.row, : len(request.token_ids)])
            self._add_blocks(request.row, [0] * len(self._block_ids), starts, parts)
        for place, row in enumerate(cached.rows):
            self._add_blocks(row, [int(first[place]) for first in first_new], starts, parts)
        for row, token_ids in zip(cached.appended_rows, cached.appended_token_ids, strict=True):
            end = row * self.token_ids.shape[1] + int(self.rows.num_tokens[row])
            starts.append(end - len(token_ids))
            parts.append(np.array(token_ids, np.int32))
        if plan.draft_token_ids:
            row_of = dict(zip(plan.req_ids, plan.rows, strict=True))
            for req_id, draft_ids in plan.draft_token_ids.items():
                row = row_of[req_id]
                starts.append(row * self.token_ids.shape[1] + int(self.rows.num_tokens[row]))
                parts.append(np.array(draft_ids, np.int32))
        if parts:
            self._write(starts, parts)

    def fill(self, batch: InputBatch, shape: BatchShape) -> BatchTensors:
        """The batch's tensors, padded to `shape`, gathered on the device."""
        numbers = np.zeros(self._step_numbers.shape[0], np.int32)
        num_reqs, width = batch.num_reqs, self._seq_lens.shape[0]
        numbers[: num_reqs + 1] = batch.query_start_loc
        numbers[num_reqs + 1 : width + 1] = batch.shape.num_tokens
        numbers[width + 1 :][:num_reqs] = batch.seq_lens
        numbers[2 * width + 1 :] = -1
        numbers[2 * width + 1 :][:num_reqs] = batch.rows
        self._decoding_rows = batch.rows if isinstance(batch, DecodeBatch) else None
        self._gather(numbers, shape)
        return self._tensors(shape)

    def blank(self, shape: BatchShape) -> BatchTensors:
        """Tensors of a step of padding only."""
        numbers = np.zeros(self._step_numbers.shape[0], np.int32)
        numbers[2 * self._seq_lens.shape[0] + 1 :] = -1
        self._gather(numbers, shape)
        return self._tensors(shape)

    def stage(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """A host array on the device."""
        return self._staging.stage([array])[0]

    def write_tokens(self, samples: Samples, new: NewTokens) -> None:
        """Put the new tokens into the device's rows, as soon as they are sampled."""
        if len(new.entries) == 0:
            return
        token_ids = cast(DeviceSamples, samples).token_ids
        if new.rows is self._decoding_rows:
            # The device has these numbers: a decoding request's new token stands behind the others.
            num_reqs = len(new.rows)
            rows, positions = self._rows_of_reqs[:num_reqs], self._seq_lens[:num_reqs]
            commit_tokens(self.token_ids, rows, positions, token_ids)
            return
        staged: list[npt.NDArray[np.generic]] = [new.rows.astype(np.int32), new.positions]
        if len(new.entries) == token_ids.shape[0]:
            rows, positions = self._staging.stage(staged)
        else:
            rows, positions, entries = self._staging.stage([*staged, new.entries])
            token_ids = token_ids[entries]
        commit_tokens(self.token_ids, rows, positions, token_ids)

    def settle_tokens(self, token_ids: IntArray, new: NewTokens) -> None:
        """Write the ids into the host's rows, unless another request has entered one since."""
        is_same = self.rows.generations[new.rows] == new.generations
        self.rows.token_ids[new.rows[is_same], new.positions[is_same]] = token_ids[is_same]

    def _add_blocks(
        self,
        row: int,
        first: list[int],
        starts: list[int],
        parts: list[npt.NDArray[np.int32]],
    ) -> None:
        """The blocks of a row from the `first` ones of each group on."""
        for group, table in enumerate(self.rows.block_tables):
            end = int(table.num_blocks[row])
            if first[group] < end:
                starts.append(
                    self._block_starts[group] + row * self.rows.max_num_blocks + first[group]
                )
                parts.append(table.block_ids[row, first[group] : end])

    def _write(self, starts: list[int], parts: list[npt.NDArray[np.int32]]) -> None:
        ends = np.cumsum([0, *(len(part) for part in parts)]).astype(np.int32)
        data, there, bounds = self._staging.stage(
            [np.concatenate(parts), np.array(starts, np.int64), ends]
        )
        write_segments(self._tables, data, there, bounds)

    def _gather(self, numbers: npt.NDArray[np.int32], shape: BatchShape) -> None:
        self._staging.stage_into(numbers, self._step_numbers)
        tensors = self._tensors(shape)
        rows = self._rows_of_reqs[: shape.num_reqs]
        groups = list(
            zip(self._block_ids, tensors.slot_mappings, tensors.block_tables, strict=True)
        )
        block_ids, slots, block_table = groups[0]
        prepare_step(
            rows,
            tensors.query_start_loc,
            tensors.seq_lens,
            self.token_ids,
            block_ids,
            tensors.input_ids,
            tensors.positions,
            slots,
            block_table,
            self.rows.block_size,
        )
        for block_ids, slots, block_table in groups[1:]:
            positions, starts = tensors.positions, tensors.query_start_loc
            map_slots(rows, starts, positions, block_ids, slots, self.rows.block_size)
            gather_block_table(rows, tensors.seq_lens, block_ids, block_table, self.rows.block_size)

    def _tensors(self, shape: BatchShape) -> BatchTensors:
        """Those parts of the buffers that a step of this shape uses; most steps repeat one."""
        tensors = self._by_shape.get(shape)
        if tensors is None:
            if len(self._by_shape) >= _MOST_SHAPES_KEPT:
                self._by_shape.clear()
            tensors = self._by_shape[shape] = self._cut(shape)
        return tensors

    def _cut(self, shape: BatchShape) -> BatchTensors:
        return BatchTensors(
            shape=shape,
            input_ids=self._input_ids[: shape.num_tokens],
            positions=self._positions[: shape.num_tokens],
            query_start_loc=self._query_start_loc[: shape.num_reqs + 1],
            seq_lens=self._seq_lens[: shape.num_reqs],
            block_tables=tuple(table[: shape.num_reqs] for table in self._block_tables),
            slot_mappings=tuple(slots[: shape.num_tokens] for slots in self._slots),
        )
