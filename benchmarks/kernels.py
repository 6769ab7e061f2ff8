"""Matrix products of the default model's shapes, each beside its limit.

    python benchmarks/kernels.py [--rows 1,16,256] [--threads N] [--seconds 0.2] [--json]

Limits are measured in the same run: reading a buffer of the weights' size, and the bf16 peak of
the tiles with operands in registers (and, for comparison, in the second-level cache). Weights are
used in turn from a set larger than the caches, as the layers of a model are, so a small M shows
memory. Each figure is the best of many short rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from tokenmill.kernels import gemm, native

SHAPES = [(1536, 576), (576, 1536), (576, 576), (192, 576), (49152, 576)]
"""(N, K): gate and up, down, q and output, k and v, logits."""
WORKING_SET = 100 << 20
"""Bytes of weights that are used in turn; a model's worth."""
BLOCK_BYTES = {"Q4_1": 20, "Q8_0": 34}
FORMATS = ["torch bf16", "bf16", *BLOCK_BYTES]


@dataclass(frozen=True)
class Limits:
    """What the machine can do at best."""

    bytes_per_second: float
    """Reading the working set with all threads."""
    flops_registers: float
    """bf16 tiles, operands in registers; 0 without AMX."""
    flops_cache: float
    """bf16 tiles, operands in the second-level cache; 0 without AMX."""


@dataclass(frozen=True)
class Figure:
    """One product."""

    weights: str
    n: int
    k: int
    m: int
    milliseconds: float
    gigabytes_per_second: float
    share_of_bandwidth: float
    teraflops: float
    share_of_peak: float


def measure_limits() -> Limits:
    module = native.module()
    has_tiles = native.active_isa() == "amx"
    return Limits(
        bytes_per_second=module.measure_read_bandwidth(WORKING_SET, 20),
        flops_registers=module.measure_amx_peak(False, 200) if has_tiles else 0.0,
        flops_cache=module.measure_amx_peak(True, 200) if has_tiles else 0.0,
    )


def best_seconds(call: Callable[[], object], seconds: float) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def product(weights: str, n: int, k: int, copies: int) -> Callable[[int], Callable[[], object]]:
    """For a number of rows, a call that multiplies them by the next of `copies` weights."""
    if weights in BLOCK_BYTES:
        raw = torch.randint(0, 60, (n * k // 32 * BLOCK_BYTES[weights],), dtype=torch.uint8)
        blocks = cycle([gemm.PackedBlocks.pack(weights, raw, n, k) for _ in range(copies)])

        def with_blocks(m: int) -> Callable[[], object]:
            x, out = torch.randn(m, k), torch.empty(m, n, dtype=torch.bfloat16)
            return lambda: gemm.gemm_blocks(gemm.quantize_rows(x), next(blocks), out=out)

        return with_blocks
    weight = torch.randn(n, k).bfloat16()
    if weights == "bf16":
        packed = cycle([gemm.PackedBf16.pack(weight) for _ in range(copies)])

        def with_bf16(m: int) -> Callable[[], object]:
            x, out = torch.randn(m, k).bfloat16(), torch.empty(m, n, dtype=torch.bfloat16)
            return lambda: gemm.gemm_bf16(x, next(packed), out=out)

        return with_bf16
    plain = cycle([weight.clone() for _ in range(copies)])

    def with_torch(m: int) -> Callable[[], object]:
        x = torch.randn(m, k).bfloat16()
        return lambda: functional.linear(x, next(plain))

    return with_torch


def weight_bytes(weights: str, n: int, k: int) -> int:
    return n * k // 32 * BLOCK_BYTES[weights] if weights in BLOCK_BYTES else n * k * 2


def figures(rows: list[int], limits: Limits, seconds: float) -> Iterator[Figure]:
    for n, k in SHAPES:
        for weights in FORMATS:
            num_bytes = weight_bytes(weights, n, k)
            call_with = product(weights, n, k, copies=WORKING_SET // num_bytes + 1)
            for m in rows:
                passed = best_seconds(call_with(m), seconds)
                flops = 2 * m * n * k / passed
                yield Figure(
                    weights=weights,
                    n=n,
                    k=k,
                    m=m,
                    milliseconds=passed * 1e3,
                    gigabytes_per_second=num_bytes / passed / 1e9,
                    share_of_bandwidth=num_bytes / passed / limits.bytes_per_second,
                    teraflops=flops / 1e12,
                    share_of_peak=flops / (limits.flops_registers or float("inf")),
                )


def show(console: Console, limits: Limits, found: list[Figure]) -> None:
    console.print(
        f"{native.active_isa()}, {native.module().num_threads()} threads;"
        f" reading {limits.bytes_per_second / 1e9:.1f} GB/s;"
        f" bf16 tiles {limits.flops_registers / 1e12:.2f} TFLOP/s from registers,"
        f" {limits.flops_cache / 1e12:.2f} from the second-level cache"
    )
    table = Table()
    for heading in ["N x K", "M", "weights", "ms", "GB/s", "of read", "TFLOP/s", "of peak"]:
        table.add_column(heading, justify="right")
    for last, figure in zip([None, *found], found, strict=False):
        if last is not None and (last.n, last.k) != (figure.n, figure.k):
            table.add_section()
        table.add_row(
            f"{figure.n} x {figure.k}",
            str(figure.m),
            figure.weights,
            f"{figure.milliseconds:.3f}",
            f"{figure.gigabytes_per_second:.1f}",
            f"{figure.share_of_bandwidth:.0%}",
            f"{figure.teraflops:.3f}",
            f"{figure.share_of_peak:.0%}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Matrix products beside their limits.")
    parser.add_argument("--rows", default="1,4,16,64,256,1024", help="values of M, with commas")
    parser.add_argument("--threads", type=int, help="default: the processors of the affinity mask")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each figure")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if arguments.threads:
        native.module().set_num_threads(arguments.threads)
    torch.set_num_threads(native.module().num_threads())
    limits = measure_limits()
    found = list(figures([int(m) for m in arguments.rows.split(",")], limits, arguments.seconds))
    if arguments.json:
        print(json.dumps({"limits": asdict(limits), "figures": [asdict(f) for f in found]}))
    else:
        show(Console(), limits, found)


if __name__ == "__main__":
    main()
