"""Memory of KV caches: what it looks like, and when it is taken."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest
import torch

from tokenmill.worker.kv_memory import HUGE_PAGE, empty_kv_cache

CPU = torch.device("cpu")


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_cache_can_be_written_everywhere(dtype: torch.dtype) -> None:
    for shape in [(3, 2, 5, 64), (70, 2, 9, 2176), (0, 2, 3, 64)]:
        cache = empty_kv_cache(shape, dtype, CPU)
        assert cache.shape == shape
        assert cache.dtype == dtype
        assert cache.is_contiguous()
        cache.fill_(3)
        assert bool((cache == 3).all())


def test_large_caches_begin_with_a_huge_page_and_cost_nothing_before_they_are_written() -> None:
    before = resident_bytes()
    cache = empty_kv_cache((512 << 20,), torch.int8, CPU)
    assert cache.data_ptr() % HUGE_PAGE == 0
    assert resident_bytes() - before < 16 << 20
    cache[: 64 << 20] = 1
    assert 60 << 20 < resident_bytes() - before < 96 << 20
    del cache
    gc.collect()
    assert resident_bytes() - before < 16 << 20
