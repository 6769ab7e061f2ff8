"""Which kernels a step spends its time in, as torch's profiler sees them."""

from __future__ import annotations

from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpucheck.driving import Driver

NUM_STEPS = 8
NUM_SHOWN = 25
_NAME_LENGTH = 80


def profiled_steps(driver: Driver) -> list[dict[str, Any]]:
    """The kernels of a step by time, the longest first, and how much of the step they are."""
    on_gpu = driver.device == "cuda"
    with profile(
        activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU],
        # A GPU's kernels are seen whatever thread launched them.
        experimental_config=None if on_gpu else _ExperimentalConfig(profile_all_threads=True),
    ) as found:
        steps = driver.decode(NUM_STEPS)
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    kernels = []
    for event in found.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if event.device_type == wanted and microseconds:
            kernels.append((microseconds / NUM_STEPS, event.count / NUM_STEPS, event.key))
    kernels.sort(reverse=True)
    step = steps.ms * 1e3
    rows = [
        _row(name, microseconds, count, step) for microseconds, count, name in kernels[:NUM_SHOWN]
    ]
    rest = kernels[NUM_SHOWN:]
    if rest:
        rows.append(_row("others", sum(r[0] for r in rest), sum(r[1] for r in rest), step))
    rows.append(_row("all", sum(k[0] for k in kernels), sum(k[1] for k in kernels), step))
    return rows


def _row(name: str, microseconds: float, count: float, step: float) -> dict[str, Any]:
    return {
        "kernel": name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 3]}...",
        "us a step": microseconds,
        "calls a step": count,
        "of the step": microseconds / step,
    }
