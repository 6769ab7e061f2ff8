"""The machine's limits are numbers that a machine can have."""

from __future__ import annotations

import pytest
import torch

from helpers import isas
from tokenmill.entrypoints.bench.limits import NativeLimits, TorchLimits, best_seconds, limits_of
from tokenmill.kernels import native


def test_our_kernels_are_measured_by_our_own_instructions():
    limits = limits_of("cpu", "bfloat16")
    assert isinstance(limits, NativeLimits)
    assert 1e8 < limits.read_bandwidth(1 << 20) < 1e13
    dense, blocks = limits.peak(blocks=False), limits.peak(blocks=True)
    assert 1e9 < dense.flops < 1e14
    assert 1e9 < blocks.flops < 1e14
    if native.active_isa() == "avx512":
        assert dense.measured_as.startswith("bf16 with AVX-512")
        assert blocks.measured_as.startswith("int8 with AVX-512")
    floats = limits_of("cpu", "float32").peak(blocks=True)
    assert 1e9 < floats.flops < 1e13
    assert floats.measured_as.startswith("float32 with AVX")


def test_the_way_of_a_cache_line_is_measured_between_two_threads():
    limits = limits_of("cpu", "bfloat16")
    with isas.active(native.active_isa()):
        native.module().set_num_threads(2)
        seconds = limits.handover()
        assert seconds is not None
        assert 1e-9 < seconds < 1
        native.module().set_num_threads(1)
        assert limits.handover() is None
    assert TorchLimits("cpu", torch.float32).handover() is None


@pytest.mark.parametrize(
    ("isa", "words"),
    [
        (isa, words)
        for isa, words in (("avx2", "AVX2"), ("portable", "vectors of 128 bits"))
        if isa in native.isas()
    ],
)
def test_lower_levels_are_measured_by_what_they_multiply_with(isa, words):
    with isas.active(isa):
        limits = limits_of("cpu", "bfloat16")
        assert 1e8 < limits.read_bandwidth(1 << 20) < 1e13
        for blocks, kind in ((False, "float32"), (True, "int8")):
            peak = limits.peak(blocks=blocks)
            assert 1e9 < peak.flops < 1e13
            assert peak.measured_as.startswith(f"{kind} with {words}")
        with pytest.raises(RuntimeError, match="needs avx512"):
            native.module().measure_peak("avx512_bf16", 1)


@pytest.mark.parametrize("isa", [isa for isa in isas.OF_ROWS if isa == "avx512"])
def test_instructions_that_are_not_in_use_are_not_measured(isa):
    with isas.active(isa):
        module = native.module()
        assert module.measure_peak("avx512_bf16", 1) > 0
        with pytest.raises(RuntimeError, match="needs amx"):
            module.measure_peak("amx_cache", 1)
        with pytest.raises(ValueError, match="no multiplier is called mmx"):
            module.measure_peak("mmx", 1)


def test_everything_else_is_measured_by_torch(monkeypatch):
    for device, dtype in (("cpu", "float16"), ("cuda", "bfloat16")):
        assert isinstance(limits_of(device, dtype), TorchLimits)
    limits = TorchLimits("cpu", torch.float32)
    assert limits.read_bandwidth(1 << 20) > 1e7
    peak = limits.peak(blocks=False)
    assert peak.flops > 1e7
    assert peak.measured_as == "torch product of 512 x 512 in float32"


def test_the_best_of_at_least_three_calls_counts(monkeypatch):
    # The start; three calls of 5, 3 and 8 s; and the time is over.
    times = iter([0.0, 0.0, 5.0, 9.0, 12.0, 12.0, 20.0, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    calls = []
    assert best_seconds(lambda: calls.append(1), 1.0) == 3.0
    assert len(calls) == 4  # one to warm up
