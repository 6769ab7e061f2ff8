"""Blocks that the benchmarks write are those that the gguf library reads."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from tokenmill.kernels.gemm import BLOCK_TYPES

FOLDER = Path(__file__).parents[3] / "benchmarks"

# What uniform codes of these many bits cost on values drawn from a normal distribution.
ERRORS = {
    "Q2_K": 0.36,
    "Q3_K": 0.20,
    "Q4_K": 0.09,
    "Q5_K": 0.045,
    "Q6_K": 0.025,
    "IQ4_NL": 0.10,
    "IQ4_XS": 0.10,
    "MXFP4": 0.15,
    "Q4_0": 0.10,
    "Q4_1": 0.09,
    "Q5_0": 0.05,
    "Q5_1": 0.045,
    "Q8_0": 0.006,
}


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


@pytest.mark.parametrize("block_type", BLOCK_TYPES)
def test_blocks_are_read_back_as_what_was_written(block_type):
    from block_types import quantize

    rng = np.random.default_rng(3)
    values = rng.standard_normal((24, 512), np.float32) * 10.0 ** rng.uniform(-2, 1, (24, 1))
    values = values.astype(np.float32)
    values[3] = 0
    raw = quantize(values, block_type)
    kind = gguf.GGMLQuantizationType[block_type]
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    assert raw.shape == (24, 512 // num_values * num_bytes)
    back = gguf.quants.dequantize(raw, kind)
    assert not back[3].any()
    size = np.sqrt(np.square(values).mean(-1))
    errors = np.sqrt(np.square(back - values).mean(-1))[size > 0] / size[size > 0]
    assert ERRORS[block_type] / 4 < errors.mean() < ERRORS[block_type]
