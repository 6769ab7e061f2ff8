"""The null block is finite from the start, wherever a backend keeps its blocks."""

from __future__ import annotations

import pytest
import torch

from tokenmill.attention.backend import AttentionSpec
from tokenmill.attention.cpu import CpuBackend
from tokenmill.attention.reference import ReferenceBackend
from tokenmill.attention.triton import TritonBackend
from tokenmill.worker import bind

NUM_BLOCKS = 5
SPEC = AttentionSpec(
    num_heads=2, num_kv_heads=2, head_size=64, scale=1.0, dtype="float32", block_size=32
)


@pytest.mark.parametrize("backend", [ReferenceBackend(), CpuBackend(), TritonBackend()])
def test_keys_and_values_of_the_null_block_are_zero(backend, monkeypatch) -> None:
    shape = backend.get_kv_cache_shape(SPEC, NUM_BLOCKS)
    monkeypatch.setattr(
        torch, "empty", lambda shape, **kinds: torch.full(shape, torch.nan, **kinds)
    )
    cache = bind._empty_cache(shape, NUM_BLOCKS, torch.float32, torch.device("cpu"))
    num_zeros = int((cache == 0).sum())
    assert num_zeros == 2 * 2 * 32 * 64  # keys and values, KV heads, tokens, values of a head
    assert int(cache.isnan().sum()) == (NUM_BLOCKS - 1) * num_zeros
