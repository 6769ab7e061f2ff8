"""Options of measurements are refused before anything is loaded."""

from __future__ import annotations

import pytest

from tokenmill.entrypoints.bench.options import (
    KernelOptions,
    LatencyOptions,
    StartupOptions,
    ThroughputOptions,
)
from tokenmill.errors import ConfigError


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (LatencyOptions, "batch_size"),
        (LatencyOptions, "output_len"),
        (ThroughputOptions, "num_prompts"),
        (StartupOptions, "num_iters"),
    ],
)
def test_counts_are_at_least_one(owner, name):
    with pytest.raises(ConfigError, match=f"{name}=0 must be an integer of at least 1"):
        owner(**{name: 0})


def test_warming_up_may_be_left_out():
    assert LatencyOptions(num_iters_warmup=0).num_iters_warmup == 0
    with pytest.raises(ConfigError, match="num_iters_warmup=-1"):
        ThroughputOptions(num_iters_warmup=-1)


@pytest.mark.parametrize("text", ["", "1,x", "0", "4,-1", "1.5"])
def test_lists_of_numbers(text):
    for name in ("rows", "contexts"):
        with pytest.raises(ConfigError, match=f"{name}='.*' must be positive integers"):
            KernelOptions(**{name: text})
    with pytest.raises(ConfigError, match="seconds=0"):
        KernelOptions(seconds=0)
