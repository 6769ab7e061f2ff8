"""Tokens a second while every request decodes, beside what the card's limits allow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gpucheck.driving import Capture, Driver, Steps, capture_counted
from gpucheck.limits import BANDWIDTH, MATMUL
from gpucheck.models import SMALLER, Shape, Stored, engine
from gpucheck.profile import profiled_host, profiled_steps
from gpucheck.report import Budget, Report, Row
from gpucheck.timing import synchronize

SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}


@dataclass(frozen=True, slots=True)
class Load:
    """How much is decoded."""

    nums_requests: tuple[int, ...]
    prompt_len: int
    num_warm: int
    num_timed: int


def load(shape: Shape, *, quick: bool) -> Load:
    if shape.name == "tiny":
        return Load((1, 4), 24, 2, 6)
    if quick:
        return Load((1, 64), 512, 8, 48)
    return Load((1, 8, 64, 256), 512, 16, 100)


def run(
    shape: Shape, device: str, report: Report, budget: Budget, *, quick: bool, with_profile: bool
) -> Iterator[Row]:
    what = load(shape, quick=quick)
    on_gpu = device == "cuda"
    few = (what.nums_requests[0],)
    some = tuple(dict.fromkeys((*few, what.nums_requests[-2])))
    enough = 15.0 if on_gpu else 0.0
    yield from _rates(shape, device, report, budget, what, _Manner(), with_profile=with_profile)
    manners = [
        _Manner("exact mode", {"exact": True}, few if quick else some),
        # What a CPU takes instead is not what is measured here.
        *(_Manner(s.name, s.settings, few, s) for s in (SMALLER if on_gpu else ())),
        _Manner("without graphs", {"enforce_eager": True}, few),
    ]
    for manner in manners:
        budget.check(enough)
        yield from _rates(shape, device, report, budget, what, manner)


@dataclass(frozen=True, slots=True)
class _Manner:
    """How an engine is built, and what is measured of it."""

    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    nums_requests: tuple[int, ...] = ()
    """None of them are all."""
    stored: Stored = field(default_factory=Stored)


def _rates(
    shape: Shape,
    device: str,
    report: Report,
    budget: Budget,
    what: Load,
    manner: _Manner,
    *,
    with_profile: bool = False,
) -> Iterator[Row]:
    nums_requests = manner.nums_requests or what.nums_requests
    most = max(nums_requests)
    name = f"{shape.name}, {manner.name}" if manner.name else shape.name
    begin = time.perf_counter()
    built_with = {"exact": False} | settings(what, most) | manner.settings
    with capture_counted(device) as capture, engine(shape, device, **built_with) as llm:
        synchronize(device)
        seconds = time.perf_counter() - begin
        yield _built(name, shape.decode_bytes(0, manner.stored), seconds, capture)
        driver = Driver(llm, device)
        for num_requests in nums_requests:
            budget.check(3.0)
            steps = measure(driver, what, num_requests, temperature=0.0)
            least = least_ms(report, shape, steps, num_requests, manner.stored)
            yield decode_row(f"{name}, {num_requests}", steps, num_requests, least)
            if with_profile:
                kernels, functions = profiled(driver, what, num_requests)
                report.profiles[f"{name}, {num_requests}"] = kernels
                report.profiles[f"{name}, {num_requests}, host"] = functions
                report.save()
        if manner.name:
            return
        for num_requests in dict.fromkeys((nums_requests[0], most)):
            budget.check(3.0)
            steps = measure(driver, what, num_requests, **SAMPLED)
            least = least_ms(report, shape, steps, num_requests, manner.stored)
            yield decode_row(f"{name}, {num_requests}, sampled", steps, num_requests, least)


def settings(what: Load, most: int) -> dict[str, Any]:
    # While the others' prompts are computed, the first requests decode already.
    length = what.prompt_len + what.num_warm + what.num_timed + 256
    return {
        "max_num_seqs": most,
        "max_model_len": -(-length // 64) * 64,
        "max_num_batched_tokens": max(8_192, most) if what.prompt_len >= 512 else 256,
        "async_scheduling": True,
        "enable_prefix_caching": False,
    }


def profiled(
    driver: Driver, what: Load, num_requests: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The kernels of a step of so many requests, and the functions of the host."""
    _begin(driver, what, num_requests, temperature=0.0)
    kernels = profiled_steps(driver)
    functions = profiled_host(driver)
    driver.clear()
    return kernels, functions


def _begin(driver: Driver, what: Load, num_requests: int, **params: Any) -> None:
    """Requests that decode, after some steps."""
    driver.add(num_requests, what.prompt_len, **params)
    driver.until_first_tokens()
    driver.decode(what.num_warm)


def measure(driver: Driver, what: Load, num_requests: int, **params: Any) -> Steps:
    """Steps of so many requests, after some that are not timed."""
    _begin(driver, what, num_requests, **params)
    steps = driver.decode(what.num_timed)
    driver.clear()
    return steps


def decode_row(case: str, steps: Steps, num_requests: int, least: float | None) -> Row:
    return Row(
        "decode",
        case,
        steps.ms,
        least,
        # Each step brings every request a token.
        ok=steps.num_tokens == num_requests * steps.num_steps,
        figures={
            "tok/s": steps.tokens_per_second,
            "host ms": steps.host_ms,
            "graph hits": steps.graph_hits,
            "context": steps.mean_cached_tokens / num_requests,
        },
    )


def least_ms(
    report: Report, shape: Shape, steps: Steps, num_requests: int, stored: Stored
) -> float | None:
    """A step at the card's limits: its bytes or its products, whichever take longer."""
    bandwidth, matmul = report.limit(BANDWIDTH), report.limit(MATMUL)
    if bandwidth is None or matmul is None:
        return None
    moving = shape.decode_bytes(steps.mean_cached_tokens, stored) / bandwidth
    computing = shape.decode_flops(num_requests, steps.mean_cached_tokens) / matmul
    return max(moving, computing) * 1e3


def _built(name: str, num_bytes: float, seconds: float, capture: Capture) -> Row:
    return Row(
        "decode",
        f"{name}, start",
        seconds * 1e3,
        figures={
            "weights GB": num_bytes / 1e9,
            "capture s": capture.seconds,
            "capture MiB": capture.num_bytes / (1 << 20),
        },
    )
