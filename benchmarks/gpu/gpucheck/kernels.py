"""Every kernel at real models' sizes: its results beside a reference, its time beside limits."""

from __future__ import annotations

import functools
import importlib
import math
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from gpucheck.cases.case import SAME, Case, Place
from gpucheck.limits import BANDWIDTH, MATMUL
from gpucheck.report import Budget, OutOfTime, Report, Row
from gpucheck.timing import median_milliseconds, milliseconds_once, synchronize

GROUPS = ("elementwise", "attention", "gemm", "inputs", "sampling", "moe", "latents", "states")
"""Modules of `cases`, each with a function `cases(place)`; the newest last, if time runs out."""


def run(device: str, report: Report, budget: Budget, *, quick: bool) -> Iterator[Row]:
    place = Place(device, small=device == "cpu", quick=quick)
    if device == "cpu":
        prepare_interpreter()
    launched: dict[str, int] = {}
    try:
        watch_launches(launched)
    except Exception as error:  # noqa: BLE001 - one module; the others are to be checked
        traceback.print_exc()
        yield _failed("modules of kernels", error)
    for group in GROUPS:
        try:
            for case in importlib.import_module(f"gpucheck.cases.{group}").cases(place):
                budget.check(1.0)
                yield _row(case, place, report)
        except OutOfTime:
            raise
        except Exception as error:  # noqa: BLE001 - one group; the others are to be checked
            traceback.print_exc()
            synchronize(device)  # raises again if the device cannot be used any more
            yield _failed(f"rest of {group}", error)
    missing = sorted(name for name, count in launched.items() if count == 0)
    yield Row(
        "kernels",
        "kernels without a case here",
        figures={"number": len(missing), "which": ", ".join(missing)},
    )


@functools.cache
def prepare_interpreter() -> None:
    """Have Triton's interpreter round as a GPU does, as the kernels' tests have it."""
    sys.path.append(str(Path(__file__).parents[3] / "tests"))
    from helpers import triton_interpreter

    triton_interpreter.adapt_interpreter()


def watch_launches(launches: dict[str, int]) -> None:
    """Count how often each kernel of the package is launched from now on, by its name."""
    from tokenmill.kernels.gpu.compile import collect_cases

    for case in collect_cases():
        name = f"{case.kernel.fn.__module__.rpartition('.')[2]}.{case.kernel.fn.__name__}"
        if name not in launches:
            launches[name] = 0
            case.kernel.add_pre_run_hook(partial(_count, launches, name))


def _count(launches: dict[str, int], name: str, *_: object, **__: object) -> None:
    launches[name] += 1


def _row(case: Case, place: Place, report: Report) -> Row:
    try:
        return _checked(case, place, report)
    except Exception as error:  # noqa: BLE001 - one kernel; the next may be right
        traceback.print_exc()
        synchronize(place.device)  # raises again if the device cannot be used any more
        return _failed(f"{case.op} {case.sizes}", error)


def _failed(what: str, error: Exception) -> Row:
    reason = f"{type(error).__name__}: {str(error)[:200]}"
    return Row("kernels", what, ok=False, figures={"failed": reason})


def _checked(case: Case, place: Place, report: Report) -> Row:
    first_ms = milliseconds_once(lambda: case.launch(0), place.device)
    figures: dict[str, object] = {}
    is_right = True
    for found, expected, tolerance in case.results():
        error, worst = _errors(found, expected, exactly=tolerance == SAME)
        figures["error"] = max(error, float(figures.get("error", 0.0)))  # type: ignore[arg-type]
        figures["worst"] = max(worst, float(figures.get("worst", 0.0)))  # type: ignore[arg-type]
        is_right &= error <= tolerance and worst <= 5 * tolerance
    ms = None if place.small else median_milliseconds(case.launch, place.device)
    if ms and case.other is not None:
        figures[case.other_name] = median_milliseconds(case.other, place.device)
    if ms and case.num_bytes:
        figures["GB/s"] = case.num_bytes / ms / 1e6
    if ms and case.num_flops:
        figures["TFLOP/s"] = case.num_flops / ms / 1e9
    return Row(
        "kernels",
        f"{case.op} {case.sizes}",
        ms,
        _least_ms(case, report) if ms else None,
        ok=is_right,
        figures=figures | {"first ms": first_ms},
    )


def _errors(found: torch.Tensor, expected: torch.Tensor, *, exactly: bool) -> tuple[float, float]:
    """The norm of the error over that of what was expected, and the worst of an element, over its
    own size and the mean one. Not a number becomes infinity.

    Where results must be the same `exactly`, both are the share of wrong elements.
    """
    if exactly:
        wrong = float((found != expected).float().mean())
        return wrong, wrong
    expected = expected.double()
    error = (found.double() - expected).abs()
    norm = float(error.norm() / expected.norm().clamp(min=1e-30))
    typical = expected.square().mean().sqrt()
    worst = float((error / (expected.abs() + typical).clamp(min=1e-30)).max())
    return tuple(x if math.isfinite(x) else math.inf for x in (norm, worst))  # type: ignore[return-value]


def _least_ms(case: Case, report: Report) -> float | None:
    bandwidth, matmul = report.limit(BANDWIDTH), report.limit(MATMUL)
    if bandwidth is None or matmul is None or not (case.num_bytes or case.num_flops):
        return None
    return max(case.num_bytes / bandwidth, case.num_flops / (case.matmul_speed * matmul)) * 1e3
