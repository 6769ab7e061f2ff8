"""The models that `benchmarks/experts.py` puts side by side."""

from __future__ import annotations

import runpy
from math import prod
from pathlib import Path

import pytest

from tokenmill.models.loader import tensor_shapes
from tokenmill.simulate.cost import EXPERTS

BENCHMARK = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "experts.py"))


def active_values(name: str, share: float) -> float:
    """Of matrices, with this share of the experts."""
    shapes = tensor_shapes(BENCHMARK["COMMON"] | BENCHMARK["MODELS"][name])
    return sum(
        prod(shape) * (share if EXPERTS in tensor else 1.0)
        for tensor, shape in shapes.items()
        if len(shape) > 1
    )


def test_both_models_have_the_same_active_size() -> None:
    share = BENCHMARK["NUM_CHOSEN"] / BENCHMARK["NUM_EXPERTS"]
    experts, dense = active_values("experts", share), active_values("dense", 1.0)
    assert experts == pytest.approx(dense, rel=0.01)  # routers are what differs
    assert active_values("experts", 1.0) > 5 * dense


def test_the_table_has_a_line_for_each_case() -> None:
    figure = BENCHMARK["Figure"](50.0, 100.0, "memory", 1e6)
    cases = {case.name: figure for case in BENCHMARK["CASES"]}
    lines = BENCHMARK["table"]({"int4": {"experts": cases, "dense": cases}}).splitlines()
    assert len(lines) == 2 + len(BENCHMARK["CASES"])
    assert lines[2].endswith("| 50.0 | 50% (bytes) | 50.0 | 50% (bytes) | 1.00 | 1.00 | 1.00 |")
