"""Parts of stored tensors have the values that the whole has there."""

from __future__ import annotations

import pytest
import torch

from helpers.blocks import random_blocks
from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.errors import CheckpointError
from tokenmill.kernels import native
from tokenmill.kernels.gemm import BLOCK_VALUES, PackedBlocks
from tokenmill.layers.weights import plain_raw
from tokenmill.parallel.shares import even_share, kv_head_share, vocab_parts
from tokenmill.quantization.dequantize import dequantize
from tokenmill.quantization.slices import columns_of, rows_of


def values(raw):
    return dequantize(raw, torch.float32)


def stored(tensor_format, num_rows, num_columns):
    if tensor_format in BLOCK_VALUES:
        blocks, _ = random_blocks(tensor_format, num_rows, num_columns)
        return RawTensor((num_rows, num_columns), tensor_format, blocks.reshape(-1))
    matrix = torch.randn(num_rows, num_columns)
    if not tensor_format.startswith("packed"):
        return plain_raw(matrix.to(getattr(torch, tensor_format)))
    block_type = tensor_format.removeprefix("packed ")
    packed = PackedBlocks.quantize(block_type, matrix)
    return RawTensor((num_rows, num_columns), tensor_format, packed.buffer)


FORMATS = ["float32", "bfloat16", "Q8_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K"]
PACKED = pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")


@pytest.mark.parametrize(
    "tensor_format",
    [*FORMATS, *(pytest.param(f"packed {x}", marks=PACKED) for x in ("Q8_0", "Q4_1"))],
)
def test_rows_and_columns(tensor_format):
    raw = stored(tensor_format, 96, 1024)
    whole = values(raw)
    assert torch.equal(values(rows_of(raw, [range(32, 96)])), whole[32:])
    assert torch.equal(values(columns_of(raw, range(256, 768))), whole[:, 256:768])
    if not tensor_format.startswith("packed"):
        several = rows_of(raw, [range(1, 3), range(70, 75)])
        assert torch.equal(values(several), torch.cat((whole[1:3], whole[70:75])))


def test_rows_of_one_range_are_a_view():
    raw = stored("float32", 8, 4)
    assert rows_of(raw, [range(2, 4)]).data.data_ptr() == raw.data.data_ptr() + 2 * 4 * 4


def test_interleaved_heads_stay_whole():
    """llama.cpp stores rows 0, n/2, 1, ... of each head."""
    matrix = torch.randn(4 * 6, 5)
    stored_rows = matrix.view(4, 2, 3, 5).transpose(1, 2).reshape(24, 5)
    raw = plain_raw(stored_rows)
    raw = RawTensor(raw.shape, raw.format, raw.data, head_permutation=4)
    assert torch.equal(values(raw), matrix)
    assert torch.equal(values(rows_of(raw, [range(12, 24)])), matrix[12:])
    with pytest.raises(CheckpointError, match="whole heads"):
        rows_of(raw, [range(3, 9)])


def test_blocks_are_not_cut():
    with pytest.raises(CheckpointError, match="columns 128 and 256: its blocks have 256 values"):
        columns_of(stored("Q4_K", 4, 256), range(128, 256))


@PACKED
def test_panels_are_not_cut():
    with pytest.raises(CheckpointError, match="32 rows lie together"):
        rows_of(stored("packed Q8_0", 64, 32), [range(16, 64)])


def test_shares():
    assert [even_share(8, rank, 4).start for rank in range(4)] == [0, 2, 4, 6]
    assert [kv_head_share(2, rank, 4).start for rank in range(4)] == [0, 0, 1, 1]
    assert even_share(8, 1, 2).of(16).stop == 128
    assert vocab_parts(100, 2) == [range(64), range(64, 100)]
    assert vocab_parts(100, 1) == [range(100)]
    assert [len(part) for part in vocab_parts(32_000, 3)] == [10_656, 10_656, 10_688]
