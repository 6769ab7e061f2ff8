"""From the parts of a matrix, as they lie in files, to one packed weight.

    file     [ gate: slab | slab | slab ]   [ up: slab | slab | slab ]
    packed   [ panels     |      |      |         |      |           ]

Slab by slab: bytes that are on their way are awaited when they are needed, and let go of once they
are packed. So a matrix of any size is in memory once, beside a slab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tokenmill.checkpoint.checkpoint import PACKED_PREFIX, RawTensor
from tokenmill.kernels.gemm import PANEL_COLUMNS, PackedBf16, PackedBlocks, PackedFloat32
from tokenmill.quantization.dequantize import dequantize, plain_values, rows_in_order
from tokenmill.quantization.packed_blocks import QUANTIZED_TYPES

PackedWeight = PackedBf16 | PackedFloat32 | PackedBlocks

SLAB_BYTES = 8 << 20
"""Of a part, at a time: enough for the threads to share."""


def pack_parts(
    packed_format: str, parts: list[RawTensor], into: PackedWeight | None = None
) -> PackedWeight:
    """One weight of parts [n, K], one below the other: a new one, or `into`, filled again.

    `packed_format` is bfloat16, float32, int8, int4, a block type, or one that is packed in the
    file already. `into` has been made of parts of these sizes in this format.
    """
    shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if packed_format.startswith(PACKED_PREFIX):
        return _packed_in_file(packed_format.removeprefix(PACKED_PREFIX), parts, shape, into)
    if packed_format == "bfloat16":
        bf16 = PackedBf16.empty(*shape) if into is None else into
        assert isinstance(bf16, PackedBf16)
        _fill(bf16.fill, parts, lambda part: dequantize(part, torch.bfloat16))
        return bf16
    if packed_format == "float32":
        float32 = PackedFloat32.empty(*shape) if into is None else into
        assert isinstance(float32, PackedFloat32)
        _fill(float32.fill, parts, lambda part: dequantize(part, torch.float32))
        return float32
    block_type = QUANTIZED_TYPES.get(packed_format, packed_format)
    blocks = PackedBlocks.empty(block_type, *shape) if into is None else into
    assert isinstance(blocks, PackedBlocks)
    assert blocks.block_type == block_type
    if packed_format in QUANTIZED_TYPES:
        _fill(blocks.fill_quantized, parts, plain_values)
    else:
        _fill(blocks.fill, parts, lambda part: rows_in_order(part).view(part.shape[0], -1))
    return blocks


def _packed_in_file(
    block_type: str, parts: list[RawTensor], shape: tuple[int, int], into: PackedWeight | None
) -> PackedBlocks:
    if into is None:
        return PackedBlocks(_in_one_piece(parts), block_type, *shape)
    assert isinstance(into, PackedBlocks)
    data = _in_one_piece(parts)
    if data.data_ptr() != into.buffer.data_ptr():  # else a view of the same file
        into.buffer.copy_(data)
    return into


def _fill(
    fill: Callable[[int, torch.Tensor], None],
    parts: list[RawTensor],
    rows_of: Callable[[RawTensor], torch.Tensor],
) -> None:
    """Call `fill(first row, rows)` for all rows, which `rows_of` takes out of the file's bytes."""
    if any(part.shape[0] % PANEL_COLUMNS for part in parts[:-1]):
        fill(0, torch.cat([rows_of(part) for part in parts]))
        return
    first = 0
    for part in parts:
        num_rows = part.shape[0]
        step = _slab_rows(part)
        for start in range(0, num_rows, step):
            fill(first + start, rows_of(_slab(part, start, min(start + step, num_rows))))
            _release(part, start, min(start + step, num_rows))
        first += num_rows


def _slab_rows(part: RawTensor) -> int:
    """Rows that are packed at a time; all of them where a file has them out of order, or in panels
    of its own.
    """
    num_rows = max(part.shape[0], 1)
    if part.head_permutation is not None or part.format.startswith(PACKED_PREFIX):
        return num_rows
    row_bytes = max(part.data.numel() // num_rows, 1)
    return max(SLAB_BYTES // row_bytes // PANEL_COLUMNS * PANEL_COLUMNS, PANEL_COLUMNS)


def _slab(part: RawTensor, start: int, stop: int) -> RawTensor:
    """Rows [start, stop), once they are there."""
    begin, end = _bytes_of(part, start, stop)
    if part.pages is not None:
        part.pages.need(begin, end)
    shape = (stop - start, *part.shape[1:])
    return replace(part, shape=shape, data=part.data[begin:end], pages=None)


def _release(part: RawTensor, start: int, stop: int) -> None:
    if part.pages is not None:
        part.pages.release(*_bytes_of(part, start, stop))


def _bytes_of(part: RawTensor, start: int, stop: int) -> tuple[int, int]:
    if stop - start == part.shape[0]:
        return 0, part.data.numel()
    row_bytes = part.data.numel() // part.shape[0]
    return start * row_bytes, stop * row_bytes


def _in_one_piece(parts: list[RawTensor]) -> torch.Tensor:
    """The bytes of panels that lie behind one another: a view of the file where they do there."""
    first, total = parts[0].data, sum(part.data.numel() for part in parts)
    ends = [part.data.data_ptr() + part.data.numel() for part in parts]
    if all(part.data.data_ptr() == end for part, end in zip(parts[1:], ends, strict=False)):
        return first.as_strided((total,), (1,))
    joined = PackedBlocks.empty_buffer(total)
    torch.cat([part.data for part in parts], out=joined)
    return joined
