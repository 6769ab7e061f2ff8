"""What the machine can do at best, measured when it is asked for.

Two numbers bound a step: how fast memory is read, on a buffer of the step's size (a small one may
lie in a cache), and how many operations are done with operands near the units. A third one tells
two runs apart: how soon a thread sees what another has written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmill.kernels import native
from tokenmill.layers.kernels import uses_native_kernels

_ROUNDS = 20
_PEAK_ROUNDS = 200
_MIN_BUFFER = 1 << 20
_PORTABLE = {"int8": "portable", "float32": "portable"}
_AVX512 = {"bf16": "avx512", "int8": "avx512", "float32": "avx512"}
_MULTIPLIERS: dict[str, tuple[dict[str, str], str]] = {
    "amx": (_AVX512, "AVX-512"),
    "avx512": (_AVX512, "AVX-512"),
    "avx2": ({"int8": "avx2", "float32": "avx2"}, "AVX2"),
    "portable": (_PORTABLE, "vectors of 128 bits"),
    "i8mm": ({"bf16": "i8mm", "int8": "i8mm", "float32": "portable"}, "NEON"),
    "dotprod": (_PORTABLE | {"int8": "dotprod"}, "NEON"),
    "neon": (_PORTABLE, "NEON"),
}
"""By instruction set: for each type the level whose instruction multiplies it, and words for it."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Most operations."""

    flops: float
    """Floating-point operations per second, a multiplication and an addition being two."""
    measured_as: str


class Limits(Protocol):
    """The limits of one device."""

    def read_bandwidth(self, num_bytes: int) -> float:
        """Bytes per second of reading a buffer of this size again and again."""
        ...

    def peak(self, *, blocks: bool) -> Peak:
        """Multiplying with weights in `blocks` of 4 or 8 bits, or in the type of the model."""
        ...

    def handover(self) -> float | None:
        """Seconds for a cache line from one thread to another, or None if that was not measured."""
        ...


class NativeLimits:
    """A processor, with the threads and instructions of our own kernels."""

    def __init__(self, dtype: str) -> None:
        """`dtype` is that of activations, bfloat16 or float32."""
        self._dense = {"bfloat16": "bf16", "float32": "float32"}[dtype]

    def read_bandwidth(self, num_bytes: int) -> float:
        return float(native.module().measure_read_bandwidth(max(num_bytes, _MIN_BUFFER), _ROUNDS))

    def peak(self, *, blocks: bool) -> Peak:
        name, measured_as = self._multiplier(blocks)
        return Peak(float(native.module().measure_peak(name, _PEAK_ROUNDS)), measured_as)

    def handover(self) -> float | None:
        return float(native.module().measure_handover(_ROUNDS)) or None

    def _multiplier(self, blocks: bool) -> tuple[str, str]:
        if native.active_isa() == "amx" and self._dense == "bf16":
            # An int8 tile takes twice the values, but a group of 32 fills half of it.
            return "amx_registers", "bf16 tiles, operands in registers"
        kind = "int8" if blocks and self._dense == "bf16" else self._dense
        levels, words = _MULTIPLIERS[native.active_isa()]
        if kind == "bf16" and "bf16" not in levels:
            kind = "float32"  # it is widened
        return f"{levels[kind]}_{kind}", f"{kind} with {words}, operands in registers"


class TorchLimits:
    """Any device that torch knows, with torch's own kernels."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device = torch.device(device)
        self._dtype = dtype

    def read_bandwidth(self, num_bytes: int) -> float:
        buffer = torch.ones(max(num_bytes, _MIN_BUFFER) // 4, device=self._device)
        return buffer.nbytes / self._best_seconds(buffer.amax)

    def peak(self, *, blocks: bool) -> Peak:
        size = 512 if self._device.type == "cpu" else 8192
        a = torch.randn(size, size, device=self._device).to(self._dtype)
        b = torch.randn(size, size, device=self._device).to(self._dtype)
        seconds = self._best_seconds(lambda: a @ b)
        name = str(self._dtype).removeprefix("torch.")
        return Peak(2 * size**3 / seconds, f"torch product of {size} x {size} in {name}")

    def handover(self) -> float | None:
        return None

    def _best_seconds(self, call: Callable[[], object]) -> float:
        """Of one call. On an accelerator many are queued, so that it never waits for the host."""
        if self._device.type == "cpu":
            return best_seconds(call, 0.2)
        synchronize = torch.get_device_module(self._device).synchronize
        best = float("inf")
        for _ in range(3):
            synchronize()
            begin = time.perf_counter()
            for _ in range(_ROUNDS):
                call()
            synchronize()
            best = min(best, (time.perf_counter() - begin) / _ROUNDS)
        return best


def limits_of(device: str, dtype: str) -> Limits:
    """The limits of `device` (such as `cpu`) for models of `dtype`."""
    if device == "cpu" and uses_native_kernels(dtype):
        return NativeLimits(dtype)
    return TorchLimits(device, getattr(torch, dtype))


def best_seconds(call: Callable[[], object], seconds: float) -> float:
    """The shortest of the calls that fit into `seconds`, of at least three."""
    call()
    best, end, num_calls = float("inf"), time.perf_counter() + seconds, 0
    while num_calls < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
        num_calls += 1
    return best
