"""Tokens a second while every request decodes, beside what the card's limits allow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpucheck.driving import Capture, Driver, Steps, capture_counted
from gpucheck.limits import BANDWIDTH, MATMUL
from gpucheck.models import Shape, engine
from gpucheck.profile import profiled_steps
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
    yield from _rates(shape, device, report, budget, what, exact=False, with_profile=with_profile)
    budget.check(20.0 if device == "cuda" else 0.0)
    yield from _rates(shape, device, report, budget, what, exact=True, with_profile=False)


def _rates(
    shape: Shape,
    device: str,
    report: Report,
    budget: Budget,
    what: Load,
    *,
    exact: bool,
    with_profile: bool,
) -> Iterator[Row]:
    nums_requests = what.nums_requests[::2] if exact else what.nums_requests
    most = max(nums_requests)
    name = f"{shape.name}, exact mode" if exact else shape.name
    begin = time.perf_counter()
    with (
        capture_counted(device) as capture,
        engine(shape, device, **settings(what, most), exact=exact) as llm,
    ):
        synchronize(device)
        yield _built(name, shape, time.perf_counter() - begin, capture)
        driver = Driver(llm, device)
        for num_requests in nums_requests:
            budget.check(3.0)
            steps = measure(driver, what, num_requests, temperature=0.0)
            yield decode_row(report, shape, f"{name}, {num_requests}", num_requests, steps)
            if with_profile:
                profiles = report.profiles
                profiles[f"{name}, {num_requests}"] = profiled(driver, what, num_requests)
                report.save()
        if exact:
            return
        for num_requests in dict.fromkeys((nums_requests[0], most)):
            budget.check(3.0)
            steps = measure(driver, what, num_requests, **SAMPLED)
            case = f"{name}, {num_requests}, sampled"
            yield decode_row(report, shape, case, num_requests, steps)


def settings(what: Load, most: int) -> dict[str, Any]:
    # While the others' prompts are computed, the first requests decode already.
    length = what.prompt_len + what.num_warm + what.num_timed + 128
    return {
        "max_num_seqs": most,
        "max_model_len": -(-length // 64) * 64,
        "max_num_batched_tokens": max(8_192, most) if what.prompt_len >= 512 else 256,
        "async_scheduling": True,
        "enable_prefix_caching": False,
    }


def profiled(driver: Driver, what: Load, num_requests: int) -> list[dict[str, Any]]:
    """The kernels of a step of so many requests."""
    _begin(driver, what, num_requests, temperature=0.0)
    kernels = profiled_steps(driver)
    driver.clear()
    return kernels


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


def decode_row(report: Report, shape: Shape, case: str, num_requests: int, steps: Steps) -> Row:
    return Row(
        "decode",
        case,
        steps.ms,
        least_ms(report, shape, num_requests, steps.mean_cached_tokens),
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
    report: Report, shape: Shape, num_requests: int, num_cached_tokens: float
) -> float | None:
    """A step at the card's limits: its bytes or its products, whichever take longer."""
    bandwidth, matmul = report.limit(BANDWIDTH), report.limit(MATMUL)
    if bandwidth is None or matmul is None:
        return None
    moving = shape.decode_bytes(num_cached_tokens) / bandwidth
    computing = shape.decode_flops(num_requests, num_cached_tokens) / matmul
    return max(moving, computing) * 1e3


def _built(name: str, shape: Shape, seconds: float, capture: Capture) -> Row:
    return Row(
        "decode",
        f"{name}, start",
        seconds * 1e3,
        figures={
            "weights GB": shape.decode_bytes(0) / 1e9,
            "capture s": capture.seconds,
            "capture MiB": capture.num_bytes / (1 << 20),
        },
    )
