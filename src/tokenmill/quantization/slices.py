"""Parts of stored tensors: rows or columns, without a look at the others.

    rows      lie in one piece of the file: a view of it; packed weights in whole panels
    columns   a piece of every row, in whole blocks: copied

    Q4_K [2, 1024], columns 512 to 1024      | block block |BLOCK BLOCK|
                                             | block block |BLOCK BLOCK|

So a rank of several reads of a file what it will hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tokenmill.checkpoint.checkpoint import PACKED_PREFIX, Pages, RawTensor
from tokenmill.errors import CheckpointError
from tokenmill.kernels.gemm import BLOCK_VALUES, GROUP_SIZE, PANEL_COLUMNS
from tokenmill.quantization.packed_blocks import group_bytes


@dataclass(frozen=True, slots=True)
class _Within:
    """Pages of a part that begins at byte `start`."""

    pages: Pages
    start: int

    def need(self, begin: int, end: int) -> None:
        self.pages.need(self.start + begin, self.start + end)

    def release(self, begin: int, end: int) -> None:
        self.pages.release(self.start + begin, self.start + end)


def rows_of(raw: RawTensor, rows: Sequence[range]) -> RawTensor:
    """These rows of a tensor, one range behind the other; of one range, a view.

    Rows that llama.cpp has interleaved go by whole heads, those of a packed weight by whole panels.
    Raises `CheckpointError` for others.
    """
    parts = [_one_range(raw, each) for each in rows]
    if len(parts) == 1:
        return parts[0]
    for part in parts:
        part.need()
    first = parts[0]
    assert first.head_permutation is None
    num_rows = sum(part.shape[0] for part in parts)
    data = torch.cat([part.data for part in parts])
    for part in parts:
        part.release()
    return replace(first, shape=(num_rows, *first.shape[1:]), data=data, pages=None)


def columns_of(raw: RawTensor, columns: range, name: str = "a matrix") -> RawTensor:
    """These columns of a matrix [N, K], copied.

    Raises `CheckpointError`, with the tensor's `name`, if they are not whole blocks of its format.
    """
    assert raw.head_permutation is None
    num_rows, width = raw.shape
    unit = _column_unit(raw.format)
    if columns.start % unit or columns.stop % unit:
        raise CheckpointError(
            f"{name} of {width} columns in {raw.format} cannot be divided at columns"
            f" {columns.start} and {columns.stop}: its blocks have {unit} values. Take another"
            f" tensor_parallel_size, or a file in another format."
        )
    raw.need()
    # Packed weights lie in panels of several rows, of which a group of columns is one piece.
    pieces = raw.data.view(-1, width // unit, _piece_bytes(raw, num_rows, width // unit))
    data = pieces[:, columns.start // unit : columns.stop // unit].contiguous().view(-1)
    raw.release()
    return replace(raw, shape=(num_rows, len(columns)), data=data, pages=None)


def _one_range(raw: RawTensor, rows: range) -> RawTensor:
    num_rows = raw.shape[0]
    heads = raw.head_permutation
    if heads is not None:
        head_rows = num_rows // heads
        if rows.start % head_rows or rows.stop % head_rows:
            raise CheckpointError(
                f"Rows {rows.start} to {rows.stop} of a tensor of {heads} heads are not whole"
                f" heads, of {head_rows} rows each."
            )
        heads = len(rows) // head_rows
    begin, end = _row_bytes(raw, rows)
    return replace(
        raw,
        shape=(len(rows), *raw.shape[1:]),
        data=raw.data[begin:end],
        head_permutation=heads,
        pages=None if raw.pages is None else _Within(raw.pages, begin),
    )


def _row_bytes(raw: RawTensor, rows: range) -> tuple[int, int]:
    """Where in the data these rows lie."""
    num_rows = raw.shape[0]
    if not raw.format.startswith(PACKED_PREFIX):
        row_bytes = raw.data.numel() // num_rows
        return rows.start * row_bytes, rows.stop * row_bytes
    if rows.start % PANEL_COLUMNS or (rows.stop % PANEL_COLUMNS and rows.stop != num_rows):
        raise CheckpointError(
            f"A packed matrix of {num_rows} rows cannot be divided at rows {rows.start} and"
            f" {rows.stop}: {PANEL_COLUMNS} rows lie together. Take another tensor_parallel_size,"
            f" or the model's own file."
        )
    panel_bytes = raw.data.numel() // -(-num_rows // PANEL_COLUMNS)
    first, last = rows.start // PANEL_COLUMNS, -(-rows.stop // PANEL_COLUMNS)
    return first * panel_bytes, last * panel_bytes


def _column_unit(tensor_format: str) -> int:
    """Columns that lie together."""
    if tensor_format.startswith(PACKED_PREFIX):
        return GROUP_SIZE
    return BLOCK_VALUES.get(tensor_format, 1)


def _piece_bytes(raw: RawTensor, num_rows: int, num_pieces: int) -> int:
    """Bytes of the columns that lie together, of a row or of a panel."""
    if raw.format.startswith(PACKED_PREFIX):
        return group_bytes(raw.format.removeprefix(PACKED_PREFIX))
    return raw.data.numel() // (num_rows * num_pieces)
