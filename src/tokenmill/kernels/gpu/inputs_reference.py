"""The kernels of `inputs.py` in torch, request by request; arguments and results are theirs."""

from __future__ import annotations

import torch


def prepare_step_reference(
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_ids: torch.Tensor,
    block_ids: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> None:
    prepare_inputs_reference(rows, query_start_loc, seq_lens, token_ids, input_ids, positions)
    map_slots_reference(rows, query_start_loc, positions, block_ids, slot_mapping, block_size)
    gather_block_table_reference(rows, seq_lens, block_ids, block_table, block_size)


def prepare_inputs_reference(
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_ids: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    input_ids.zero_()
    positions.zero_()
    starts = query_start_loc.tolist()
    for i, (row, seq_len) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        first = seq_len - (starts[i + 1] - starts[i])
        if row >= 0 and first < seq_len:
            positions[starts[i] : starts[i + 1]] = torch.arange(first, seq_len)
            input_ids[starts[i] : starts[i + 1]] = token_ids[row, first:seq_len]


def map_slots_reference(
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_ids: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    slot_mapping.fill_(-1)
    starts = query_start_loc.tolist()
    for i, row in enumerate(rows.tolist()):
        if row >= 0:
            there = positions[starts[i] : starts[i + 1]]
            blocks = block_ids[row, there // block_size].long()
            slot_mapping[starts[i] : starts[i + 1]] = blocks * block_size + there % block_size


def gather_block_table_reference(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> None:
    for i, (row, seq_len) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        num_blocks = -(-seq_len // block_size)
        if row >= 0:
            block_table[i, :num_blocks] = block_ids[row, :num_blocks]


def write_segments_reference(
    table: torch.Tensor, data: torch.Tensor, dst_start: torch.Tensor, src_start: torch.Tensor
) -> None:
    bounds = src_start.tolist()
    for start, first, end in zip(dst_start.tolist(), bounds, bounds[1:], strict=False):
        table[start : start + end - first] = data[first:end]


def commit_tokens_reference(
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    sampled: torch.Tensor,
    is_due: torch.Tensor | None = None,
) -> None:
    width = token_ids.shape[1]
    due = [True] * len(rows) if is_due is None else is_due.tolist()
    places = zip(rows.tolist(), positions.tolist(), sampled.tolist(), due, strict=True)
    for row, position, token_id, wanted in places:
        if wanted and row >= 0 and 0 <= position < width:
            token_ids[row, position] = token_id


def gather_rows_reference(table: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
    is_real = indices >= 0
    out[is_real] = table[indices[is_real].long()].to(out.dtype)
