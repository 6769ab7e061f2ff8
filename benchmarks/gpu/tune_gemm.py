"""Which tiles and segments the exact product should use on the card at hand.

    PYTHONPATH=src python3 benchmarks/gpu/tune_gemm.py [--seconds 90] [--json results.json]

bits    whether a row has the same bits for any number of rows: in every tile of one matrix
        instruction, and between a warpgroup's and a warp's
small   products bounded by the weight's bytes, as a fraction of what the card copies
large   products bounded by arithmetic, as a fraction of what its best large product reaches

Each product stands beside torch's. Weights are read in turn from more copies than L2 holds, and
launches are replayed from a graph, so that neither the cache nor the host helps or hinders.
Kernels are compiled beforehand, in processes that fill Triton's cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial

import torch
from torch.nn import functional

from tokenmill.kernels.gpu.gemm_bf16 import matmul_exact
from tokenmill.kernels.gpu.gemm_config import (
    TILES,
    Instruction,
    SplitWorkspace,
    TileConfig,
    choose_segments,
    choose_tile,
    segment_depth,
    tiles_of,
)

SHAPES = {
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate_up": (28672, 4096),
    "8b down": (4096, 14336),
    "8b head": (128256, 4096),
    "1b qkv": (3072, 2048),
    "1b o": (2048, 2048),
    "1b gate_up": (16384, 2048),
    "1b down": (2048, 8192),
}
"""[N, K] of the layers of Llama 3 models."""
SMALL_ROWS = (1, 16, 32, 64, 128)
LARGE_ROWS = (256, 512, 2048, 8192)
L2_BYTES = 160 << 20
"""More than twice the L2 of an H200: what is read round and round does not stay in it."""
SEGMENTS = (1, 2, 4, 8)


def small(
    block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int, *, mma: bool = False
) -> TileConfig:
    return TileConfig(
        block_m, block_n, block_k, num_warps, num_stages, weight_first=not mma,
        segments_in_grid=True,
    )  # fmt: skip


def large(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> TileConfig:
    return TileConfig(
        block_m, block_n, block_k, num_warps, num_stages, weight_first=False,
        segments_in_grid=False,
    )  # fmt: skip


SMALL_TILES = {
    16: [
        small(16, 64, 128, 4, 4),
        small(16, 64, 128, 4, 5),
        small(16, 64, 256, 4, 3),
        small(16, 128, 128, 4, 3),
        small(16, 128, 128, 4, 5),
        replace(small(16, 64, 128, 4, 5), use_descriptors=False),
        small(16, 32, 128, 4, 5, mma=True),
        small(16, 32, 256, 4, 4, mma=True),
        small(16, 64, 128, 4, 5, mma=True),
    ],
    32: [
        small(32, 64, 128, 4, 4),
        small(32, 128, 64, 4, 5),
        small(32, 128, 128, 4, 4),
        small(32, 32, 128, 4, 4, mma=True),
    ],
    64: [
        small(64, 64, 128, 4, 4),
        small(64, 128, 64, 4, 4),
        small(64, 128, 128, 8, 4),
        small(64, 256, 64, 8, 4),
    ],
    128: [
        small(128, 64, 64, 4, 4),
        small(128, 128, 64, 8, 3),
        small(128, 128, 64, 8, 5),
        small(128, 256, 64, 8, 4),
    ],
}
LARGE_TILES = [
    large(128, 128, 64, 8, 3),
    large(128, 128, 64, 8, 4),
    large(128, 128, 64, 4, 3),
    large(128, 256, 64, 8, 4),
    replace(large(128, 256, 64, 8, 4), group_m=16),
    large(256, 128, 64, 8, 4),
    replace(large(128, 256, 64, 8, 3), use_descriptors=False),
    replace(large(128, 128, 64, 8, 3), segments_in_grid=True),
]


def segment_choices(tile: TileConfig, num_columns: int, depth: int) -> list[int]:
    """Numbers of segments worth a try; with many rows, what they cost where few rows want them."""
    choices = SEGMENTS
    if not tile.weight_first and tile.instruction == "wgmma":
        choices = tuple({1, choose_segments(num_columns, depth)})
    return [
        segments
        for segments in choices
        if depth // segments >= 512
        and (segments == 1 or -(-num_columns // tile.block_n) * segments <= 600)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="stop measuring after these")
    parser.add_argument("--json", help="where to write all that was measured")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds

    compile_ahead(options.workers)
    torch.manual_seed(0)
    bench = Bench(deadline)
    print(f"compiled and started after {options.seconds - bench.left():.0f} s", flush=True)
    check_bits(bench.workspace)
    results = [*bench.run_small(), *bench.run_large()]
    print_segments(results)
    print(f"{bench.left():.0f} s were left")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


# Compilation


def all_kernels() -> list[tuple[TileConfig, int]]:
    """Every (tile, segments) that is measured or checked below."""
    found = {}
    for tile in itertools.chain(*SMALL_TILES.values(), LARGE_TILES):
        for num_columns, depth in SHAPES.values():
            for segments in segment_choices(tile, num_columns, depth):
                found[tile, segments] = None
    tables = [*tiles_of(TILES["wgmma"]), *tiles_of(TILES["mma"])]
    for tile, segments in itertools.product(tables, (1, 2, 4, 8)):
        found[tile, segments] = None
    return list(found)


def compile_ahead(num_workers: int) -> None:
    """Put every kernel into Triton's cache on disk; the largest first."""
    kernels = sorted(all_kernels(), key=lambda k: -k[0].block_m * k[0].block_n * k[1])
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        failed = [f for f in pool.map(compile_one, *zip(*kernels, strict=True)) if f]
    print(f"{len(kernels)} kernels compiled")
    for failure in failed:
        print("does not compile:", failure)


def compile_one(tile: TileConfig, segments: int) -> str | None:
    """Launch a kernel on a small weight; what went wrong, if anything did."""
    try:
        depth = 1024 * segments
        x = torch.zeros(tile.block_m, depth, dtype=torch.bfloat16, device="cuda")
        weight = torch.zeros(256, depth, dtype=torch.bfloat16, device="cuda")
        out = torch.zeros(tile.block_m, 256, dtype=torch.bfloat16, device="cuda")
        workspace = SplitWorkspace.allocate("cuda", 1 << 20)
        matmul_exact(x, weight, None, out, workspace, tile=tile, num_segments=segments)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  reported, and the others are to be measured
        return f"{describe(tile, segments)}: {error!r}"[:300]
    return None


# Bits


def check_bits(workspace: SplitWorkspace) -> None:
    """Print where a row's bits depend on the number of rows, or on the instruction."""
    print("\nbits of row 0 and of the last row, for 1 to 1000 rows")
    for name in ("8b o", "8b qkv", "8b gate_up", "1b down"):
        num_columns, depth = SHAPES[name]
        segments = choose_segments(num_columns, depth)
        weight = torch.randn(num_columns, depth, device="cuda").bfloat16() / 16
        x = torch.randn(1000, depth, device="cuda").bfloat16()

        def product(
            rows: slice, tile: TileConfig, x: torch.Tensor = x, weight: torch.Tensor = weight,
            segments: int = segments,
        ) -> torch.Tensor:  # fmt: skip
            part = x[rows]
            out = part.new_full((len(part), len(weight)), torch.nan, dtype=torch.float32)
            matmul_exact(part, weight, None, out, workspace, tile=tile, num_segments=segments)
            return out

        wanted = product(slice(0, 1000), choose_tile(1000, num_columns, segments))
        close = torch.allclose(wanted, x.float() @ weight.float().t(), rtol=1e-3, atol=1e-2)
        differ: dict[Instruction, list[int]] = {"wgmma": [], "mma": []}
        for instruction, found in differ.items():
            for num_rows in (1, 2, 7, 16, 17, 33, 64, 65, 128, 129, 300, 600):
                tile = choose_tile(num_rows, num_columns, segments, instruction)
                first = product(slice(0, num_rows), tile)
                last = product(slice(1000 - num_rows, 1000), tile)
                if not (
                    torch.equal(first, wanted[:num_rows])
                    and torch.equal(last, wanted[1000 - num_rows :])
                ):
                    found.append(num_rows)
        for instruction, found in differ.items():
            state = f"DIFFER at {found} rows" if found else "equal"
            print(f"  {name:<12}{segments} segments, {instruction:<6} {state}; right: {close}")


# Speed


class Bench:
    """Measures products until the time is up."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.workspace = SplitWorkspace.allocate("cuda", 1 << 25, 1 << 15)
        self.copy_bandwidth = self._copy_bandwidth()
        self.peak = self._peak()
        print(
            f"limits: copy {self.copy_bandwidth / 1e12:.2f} TB/s,"
            f" product {self.peak / 1e12:.0f} TFLOP/s"
        )

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def run_small(self) -> list[dict]:
        print("\nfew rows: microseconds, and bytes of the weight as a fraction of the copy")
        results = []
        for name, (num_columns, depth) in SHAPES.items():
            copies = max(1, L2_BYTES // (2 * num_columns * depth)) + 1
            weights = random_matrices(copies, num_columns, depth)
            for num_rows in SMALL_ROWS:
                if self.left() < 25:
                    return results
                tiles = SMALL_TILES[max(16, num_rows)]
                limit = 2 * num_columns * depth / self.copy_bandwidth
                results += self._compare(name, num_rows, weights, tiles, limit)
        return results

    def run_large(self) -> list[dict]:
        print("\nmany rows: microseconds, and arithmetic as a fraction of the largest product")
        results = []
        for num_rows in LARGE_ROWS:
            for name, (num_columns, depth) in SHAPES.items():
                if self.left() < 2:
                    return results
                if "head" in name:
                    continue
                weights = random_matrices(2, num_columns, depth)
                limit = 2 * num_rows * num_columns * depth / self.peak
                results += self._compare(name, num_rows, weights, LARGE_TILES, limit)
        return results

    def _compare(
        self,
        name: str,
        num_rows: int,
        weights: list[torch.Tensor],
        tiles: list[TileConfig],
        limit: float,
    ) -> list[dict]:
        """Measure every tile and number of segments, and torch; print the best."""
        num_columns, depth = weights[0].shape
        (x,) = random_matrices(1, num_rows, depth)
        out = x.new_empty(num_rows, num_columns)
        torch_seconds = seconds_of([partial(functional.linear, x, w) for w in weights], limit)
        results = []
        for tile in tiles:
            for segments in segment_choices(tile, num_columns, depth):
                count = -(-depth // segment_depth(depth, segments))
                num_tiles = -(-num_rows // tile.block_m) * -(-num_columns // tile.block_n)
                values = tile.block_m * tile.block_n
                if tile.segments_in_grid and not self.workspace.holds(num_tiles, count, values):
                    continue
                how = {"tile": tile, "num_segments": segments}
                calls = [
                    partial(matmul_exact, x, w, None, out, self.workspace, **how) for w in weights
                ]
                try:
                    seconds = seconds_of(calls, limit)
                except Exception as error:  # noqa: BLE001  the other tiles are to be measured
                    print(f"  {describe(tile, segments)}: {error!r}"[:200])
                    continue
                results.append(
                    {
                        "layer": name,
                        "rows": num_rows,
                        "segments": segments,
                        "seconds": seconds,
                        "fraction": limit / seconds,
                        "torch_seconds": torch_seconds,
                        "instruction": tile.instruction,
                        "tile": asdict(tile),
                    }
                )
        results.sort(key=lambda result: result["seconds"])
        print(
            f"  {name:<11}{num_rows:>5} rows   torch {torch_seconds * 1e6:8.1f}"
            f" ({limit / torch_seconds:4.0%})",
            flush=True,
        )
        for result in results[:3]:
            print(
                f"{'':<24}{describe(TileConfig(**result['tile']), result['segments']):<44}"
                f"{result['seconds'] * 1e6:8.1f} ({result['fraction']:4.0%})"
            )
        return results

    def _copy_bandwidth(self) -> float:
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return 2 * len(source) / seconds_of([lambda: target.copy_(source)], 5e-4)

    def _peak(self) -> float:
        a, b = random_matrices(2, 8192, 8192)
        return 2 * 8192**3 / seconds_of([lambda: a @ b], 1.5e-3)


def random_matrices(count: int, num_rows: int, num_columns: int) -> list[torch.Tensor]:
    return [
        torch.randn(num_rows, num_columns, dtype=torch.bfloat16, device="cuda")
        for _ in range(count)
    ]


def seconds_of(calls: list[Callable[[], object]], expected: float) -> float:
    """Seconds of one call: the best of three replays of a graph of them, in turn."""
    num_calls = max(len(calls), min(48, int(4e-4 / expected)))
    rounds = list(itertools.islice(itertools.cycle(calls), num_calls))
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in rounds:
            call()
    graph.replay()
    return min(replays(graph, 3)) / len(rounds)


def replays(graph: torch.cuda.CUDAGraph, count: int) -> Iterator[float]:
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        yield start.elapsed_time(end) / 1e3


def print_segments(results: list[dict]) -> None:
    """What each number of segments costs at its best, where tiles keep to wgmma."""
    print("\nbest microseconds by number of segments (wgmma tiles; * is what the tables choose)")
    for name, (num_columns, depth) in SHAPES.items():
        for num_rows in (*SMALL_ROWS, *LARGE_ROWS):
            found = [
                r
                for r in results
                if (r["layer"], r["rows"], r["instruction"]) == (name, num_rows, "wgmma")
            ]
            cells = []
            for segments in SEGMENTS:
                best = min((r["seconds"] for r in found if r["segments"] == segments), default=None)
                if best is not None:
                    star = "*" if segments == choose_segments(num_columns, depth) else ""
                    cells.append(f"{segments}{star}: {best * 1e6:.1f}")
            if cells:
                print(f"  {name:<11}{num_rows:>5} rows   {'   '.join(cells)}")


def describe(tile: TileConfig, segments: int) -> str:
    return (
        f"{tile.block_m}x{tile.block_n}x{tile.block_k} warps {tile.num_warps} stages"
        f" {tile.num_stages} {'' if tile.segments_in_grid else 'in registers '}"
        f"{tile.instruction} segments {segments}{'' if tile.use_descriptors else ' pointers'}"
        f"{'' if tile.group_m == 8 else f' group {tile.group_m}'}"
    )


if __name__ == "__main__":
    main()
