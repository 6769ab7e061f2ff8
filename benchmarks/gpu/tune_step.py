"""What a decoding step gains from kernels that start early, and from our products where torch has
its own.

    PYTHONPATH=src python3 benchmarks/gpu/tune_step.py [--seconds 90] [--shape 8b]

Whole engines on random weights, as in `check.py`; each line one engine. Milliseconds of a step, at
one request measured twice, and the host's work for it.

early     bytes of a program's weight that come to the L2 cache while the kernel in front runs
own rows  up to so many rows, products run on our kernel
one loop  attention walks over neighbouring partitions in one loop
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from gpucheck import decode
from gpucheck.driving import Driver
from gpucheck.models import SHAPES, Shape, engine

from tokenmill.kernels.gpu import attention_config, gemm_config, overlap
from tokenmill.kernels.gpu.gemm_config import Choice
from tokenmill.layers.gpu import GpuKernels

GIVEN_TILES = dict(gemm_config.TILES)
GIVEN_CONFIG = attention_config.choose_config


@dataclass(frozen=True)
class Variant:
    early_bytes: int | None
    """None if kernels do not start early."""
    own_rows: int = 32
    one_loop: bool = False
    exact: bool = False

    def apply(self) -> None:
        """Have engines that are built from now on work so."""
        os.environ["TOKENMILL_GPU_OVERLAP"] = "0" if self.early_bytes is None else "1"
        overlap.overlaps.cache_clear()
        for instruction, table in GIVEN_TILES.items():
            gemm_config.TILES[instruction] = tuple(
                (most_rows, tuple(self._with_early(choice) for choice in choices))
                for most_rows, choices in table
            )
        GpuKernels.__init__.__kwdefaults__["most_own_rows"] = self.own_rows  # type: ignore[index]

        @lru_cache(maxsize=64)
        def choose_config(*args: object, **kwargs: object) -> attention_config.AttentionConfig:
            return replace(GIVEN_CONFIG(*args, **kwargs), one_loop=self.one_loop)  # type: ignore[arg-type]

        attention_config.choose_config = choose_config  # type: ignore[assignment]

    def _with_early(self, choice: Choice) -> Choice:
        early = self.early_bytes or 0 if choice.tile.early_bytes else 0
        return Choice(replace(choice.tile, early_bytes=early), choice.least_programs)

    def __str__(self) -> str:
        early = "not early" if self.early_bytes is None else f"early {self.early_bytes >> 10} KiB"
        parts = [early, f"own rows {self.own_rows}", "one loop" * self.one_loop]
        return ", ".join([*filter(None, parts), *(["exact"] if self.exact else [])])


def variants() -> Iterator[Variant]:
    """The most telling first."""
    yield Variant(None)
    yield Variant(64 << 10)
    yield Variant(64 << 10, own_rows=64, one_loop=True)
    yield Variant(64 << 10, one_loop=True)
    yield Variant(0)
    yield Variant(128 << 10, own_rows=64)
    yield Variant(256 << 10, own_rows=128)
    yield Variant(32 << 10)
    yield Variant(None, one_loop=True)
    yield Variant(64 << 10, own_rows=64, exact=True)


def milliseconds(shape: Shape, variant: Variant, device: str) -> str:
    """A line of the table."""
    quick = decode.load(shape, quick=True)
    nums = quick.nums_requests if device == "cpu" else (1, 8, 64)
    what = replace(quick, nums_requests=nums)
    settings = decode.settings(what, max(nums)) | {"exact": variant.exact}
    cells = []
    with engine(shape, device, **settings) as llm:
        driver = Driver(llm, device)
        for num_requests in nums:
            for _ in range(2 if num_requests == 1 else 1):
                steps = decode.measure(driver, what, num_requests, temperature=0.0)
                cells.append(f"{num_requests}: {steps.ms:.3f} (host {steps.host_ms:.2f})")
    return "   ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="start no engine after these")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    for variant in variants():
        if time.monotonic() > deadline:
            break
        variant.apply()
        try:
            line = milliseconds(SHAPES[options.shape], variant, options.device)
        except Exception as error:  # noqa: BLE001  reported, and the others are to be measured
            line = repr(error)[:300]
        print(f"{options.shape} {variant!s:<44} {line}", flush=True)


if __name__ == "__main__":
    main()
