"""Dequantisation against the gguf library, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.errors import CheckpointError
from tokenmill.quantization.dequantize import dequantize, rows_in_order

BLOCK_TYPES = [
    *["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"],
    *["IQ4_NL", "IQ4_XS", "MXFP4"],
]
PLAIN_TYPES = ["F32", "F16", "BF16"]

SCALE_OFFSETS = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Where a block's float16 numbers lie; at its start unless named here."""

EXTREME_SCALES = [0.0, -0.0, 65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5, np.inf, -np.inf, np.nan]


def blocks_of(kind: str, num_blocks: int, scales: np.ndarray | None = None) -> np.ndarray:
    """Random codes; scales are ordinary numbers, or taken from `scales`."""
    rng = np.random.default_rng(3)
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS.get(kind, (0,)):
        chosen = rng.normal(size=num_blocks) if scales is None else rng.choice(scales, num_blocks)
        blocks[:, offset : offset + 2] = chosen.astype(np.float16)[:, None].view(np.uint8)
    return blocks


def raw_tensor(kind: str, stored: np.ndarray, shape: tuple[int, ...], heads=None) -> RawTensor:
    return RawTensor(shape, kind, torch.from_numpy(stored.reshape(-1)), heads)


def library_values(kind: str, stored: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_block_types_equal_the_library(kind):
    num_blocks = 3000 if kind.endswith("K") else 10_000
    stored = blocks_of(kind, num_blocks)
    expected = library_values(kind, stored)
    ours = dequantize(raw_tensor(kind, stored, expected.shape), torch.float32)
    np.testing.assert_array_equal(ours.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_extreme_scales_equal_the_library(kind):
    stored = blocks_of(kind, 500, np.array(EXTREME_SCALES))
    expected = library_values(kind, stored)
    ours = dequantize(raw_tensor(kind, stored, expected.shape), torch.float32)
    np.testing.assert_array_equal(ours.numpy(), expected)


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "F32", "F16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_value_is_rounded_once(kind, dtype):
    stored = stored_plain(kind) if kind in PLAIN_TYPES else blocks_of(kind, 64)
    expected = library_values(kind, stored)
    ours = dequantize(raw_tensor(kind, stored.view(np.uint8), expected.shape), dtype)
    assert ours.dtype == dtype
    assert torch.equal(ours, torch.from_numpy(expected).to(dtype))


def stored_plain(kind: str) -> np.ndarray:
    values = np.random.default_rng(5).normal(size=(24, 40)).astype(np.float32)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", PLAIN_TYPES)
def test_plain_types_equal_the_library(kind):
    stored = stored_plain(kind)
    expected = library_values(kind, stored)
    ours = dequantize(raw_tensor(kind, stored.view(np.uint8), (24, 40)), torch.float32)
    np.testing.assert_array_equal(ours.numpy(), expected)


def test_a_plain_tensor_of_the_right_dtype_is_not_copied():
    raw = raw_tensor("BF16", stored_plain("BF16"), (24, 40))
    assert dequantize(raw, torch.bfloat16).data_ptr() == raw.data.data_ptr()


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("num_heads", [1, 3, 6])
def test_interleaved_rows_are_put_in_order_as_transformers_does(kind, num_heads):
    num_rows, blocks_per_row = 48, 2
    if kind == "F32":
        stored = np.random.default_rng(9).normal(size=(num_rows, 40)).astype(np.float32)
    else:
        stored = blocks_of(kind, num_rows * blocks_per_row).reshape(num_rows, -1)
    values = library_values(kind, stored)
    processor = LlamaTensorProcessor({"num_attention_heads": num_heads, "num_key_value_heads": 1})
    expected = processor.process(values, "blk.0.attn_q.weight").weights
    raw = raw_tensor(kind, stored.view(np.uint8), values.shape, num_heads)
    np.testing.assert_array_equal(dequantize(raw, torch.float32).numpy(), expected)


def test_a_bias_is_put_in_order_too():
    stored = np.array([0, 2, 1, 3, 4, 6, 5, 7], np.float32)
    raw = raw_tensor("F32", stored.view(np.uint8), (8,), 2)
    assert dequantize(raw, torch.float32).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_rows_that_do_not_fit_the_heads_are_refused():
    raw = raw_tensor("F32", np.zeros((6, 4), np.float32).view(np.uint8), (6, 4), 2)
    with pytest.raises(CheckpointError, match=r"6 rows.*2 heads.*multiple of 4"):
        rows_in_order(raw)


def test_an_unknown_format_is_refused_with_the_supported_ones():
    raw = RawTensor((256,), "IQ2_XXS", torch.zeros(66, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=r"IQ2_XXS.*Q4_K"):
        dequantize(raw, torch.float32)
