"""Prompts: tokens a second, and the time to the first token, beside the card's products."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from gpucheck.driving import Driver
from gpucheck.limits import MATMUL
from gpucheck.models import Shape, engine
from gpucheck.report import Budget, Report, Row

NUM_ROUNDS = 3


def loads(shape: Shape, *, quick: bool) -> list[tuple[int, int]]:
    """(number of prompts, their length); a single one is a request's time to its first token."""
    if shape.name == "tiny":
        return [(1, 48), (2, 64)]
    if quick:
        return [(1, 128), (1, 2_048), (8, 1_024)]
    return [(1, 128), (1, 1_024), (1, 2_048), (1, 8_192), (1, 32_768), (16, 1_024)]


def run(shape: Shape, device: str, report: Report, budget: Budget, *, quick: bool) -> Iterator[Row]:
    what = loads(shape, quick=quick)
    settings = {
        "max_num_seqs": 16,
        "max_model_len": max(length for _, length in what) + 16,
        "max_num_batched_tokens": 256 if shape.name == "tiny" else 8_192,
        "async_scheduling": True,
        "enable_prefix_caching": False,
    }
    peak = report.limit(MATMUL)
    with engine(shape, device, **settings) as llm:
        driver = Driver(llm, device)
        for num_prompts, length in what:
            budget.check(2.0)
            seconds = [_seconds(driver, num_prompts, length) for _ in range(NUM_ROUNDS + 1)][1:]
            took = statistics.median(seconds)
            flops = num_prompts * shape.prefill_flops(length)
            yield Row(
                "prefill",
                f"{shape.name}, {num_prompts} x {length}",
                took * 1e3,
                None if peak is None else flops / peak * 1e3,
                figures={"tok/s": num_prompts * length / took, "TFLOP/s": flops / took / 1e12}
                | ({"first token ms": took * 1e3} if num_prompts == 1 else {}),
            )


def _seconds(driver: Driver, num_prompts: int, length: int) -> float:
    """From queueing the prompts until each has its first token."""
    driver.add(num_prompts, length, temperature=0.0, max_tokens=1)
    seconds = driver.until_first_tokens()
    driver.clear()
    return seconds
