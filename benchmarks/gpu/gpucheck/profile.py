"""Where a step's time goes: kernels, as torch's profiler sees them, and functions of the host."""

from __future__ import annotations

import cProfile
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpucheck.driving import Driver

NUM_STEPS = 8
NUM_HOST_STEPS = {"cuda": 100, "cpu": 3}
NUM_SHOWN = 25
NUM_HOST_SHOWN = 60
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


def profiled_host(driver: Driver) -> list[dict[str, Any]]:
    """The host's functions in a step by their own time, the longest first.

    Python's profiler makes calls slower than they are, those of small functions most.
    """
    profiler, num_steps = cProfile.Profile(), NUM_HOST_STEPS[driver.device]
    profiler.enable()
    steps = driver.decode(num_steps)
    profiler.disable()
    found = []
    for entry in profiler.getstats():
        code = entry.code
        name = code if isinstance(code, str) else f"{Path(code.co_filename).name}: {code.co_name}"
        found.append((entry.inlinetime, entry.totaltime, entry.callcount, name))
    found.sort(reverse=True)
    return [
        {
            "function": name[:_NAME_LENGTH],
            "us a step": own / num_steps * 1e6,
            "with what it calls": total / num_steps * 1e6,
            "calls a step": calls / num_steps,
            "of the step": own * 1e3 / num_steps / steps.ms,
        }
        for own, total, calls, name in found[:NUM_HOST_SHOWN]
    ]
