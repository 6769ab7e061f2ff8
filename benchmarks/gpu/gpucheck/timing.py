"""Seconds of work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def synchronize(device: str) -> None:
    """Wait until the device has done what it was told."""
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds_once(call: Callable[[], Any], device: str) -> float:
    """Of one call, on the host's clock, from an idle device to an idle device."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def median_milliseconds(
    call: Callable[[int], Any], device: str, *, num_rounds: int = 7, min_ms: float = 10.0
) -> float:
    """The median over rounds of a call's time on the device.

    `call` is given a running number, so that it can take its data from more places than the caches
    hold. On a GPU one round is a CUDA graph of enough calls to fill `min_ms`: what launching them
    takes on the host is not counted.
    """
    call(0)
    once = milliseconds_once(lambda: call(1), device)
    if device != "cuda":
        return statistics.median(
            [once, *(milliseconds_once(lambda: call(2), device) for _ in range(2))]
        )
    eager = max(_elapsed(lambda: [call(i) for i in range(3)]) / 3, 1e-3)
    num_calls = max(1, min(200, int(min_ms / eager)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num_calls):
            call(i)
    graph.replay()
    return statistics.median(_elapsed(graph.replay) / num_calls for _ in range(num_rounds))


def _elapsed(call: Callable[[], Any]) -> float:
    """Milliseconds between two events around what a call submits."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
