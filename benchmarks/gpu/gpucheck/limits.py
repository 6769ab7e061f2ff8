"""What the card can do: bytes moved and products computed in a second, on random data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch

from gpucheck.report import Budget, Row
from gpucheck.timing import median_milliseconds

BANDWIDTH, MATMUL = "read", "bf16 matmul"
"""Names of the limits that others are compared with. Decoding reads nearly all that it moves, and
reading is faster than copying."""


def run(device: str, budget: Budget, *, quick: bool) -> Iterator[Row]:
    num_bytes = (4 << 30) if device == "cuda" else (16 << 20)
    yield _copy(device, num_bytes)
    yield _read(device, num_bytes)
    sizes = [8_192] if quick else [4_096, 8_192]
    for size in sizes if device == "cuda" else [256]:
        budget.check(1.0)
        yield _matmul(device, size, MATMUL if size == sizes[-1] or device != "cuda" else None)
    budget.check(1.0)
    yield _launch(device)


def _copy(device: str, num_bytes: int) -> Row:
    source = torch.randint(0, 1 << 30, (num_bytes // 8,), dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    ms = median_milliseconds(lambda i: target.copy_(source), device)
    return _rate("copy", ms, 2 * num_bytes, "bytes read and written")


def _read(device: str, num_bytes: int) -> Row:
    source = torch.randn(num_bytes // 4, device=device)
    out = torch.empty((), device=device)
    ms = median_milliseconds(lambda i: torch.amax(source, dim=0, out=out), device)
    return _rate(BANDWIDTH, ms, num_bytes, "bytes read by torch's amax")


def _matmul(device: str, size: int, name: str | None) -> Row:
    pairs = [
        [torch.randn(size, size, device=device).bfloat16() for _ in range(2)] for _ in range(2)
    ]
    out = torch.empty(size, size, dtype=torch.bfloat16, device=device)
    in_turn = cycle(pairs)

    def product(_: int) -> None:
        a, b = next(in_turn)
        torch.mm(a, b.T, out=out)

    # Long enough for clocks and power to settle: the first milliseconds are faster.
    ms = median_milliseconds(product, device, min_ms=100.0)
    return _rate(name or f"bf16 matmul {size}", ms, 2 * size**3, f"{size} x {size} x {size}")


def _launch(device: str) -> Row:
    x = torch.zeros(1, device=device)
    ms = median_milliseconds(lambda i: x.add_(1.0), device, min_ms=1.0)
    return Row("limits", "smallest kernel", ms, figures={"what": "in a graph, behind another"})


def _rate(name: str, ms: float, amount: float, what: str) -> Row:
    return Row("limits", name, ms, figures={"T/s": amount / ms / 1e9, "what": what})
