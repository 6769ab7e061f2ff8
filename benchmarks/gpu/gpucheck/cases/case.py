"""What a case is, and where it gets its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

BF16 = torch.bfloat16
ROUNDED = 2.5e-3
"""Allowed error, as a share of the norm, of a bfloat16 result that is computed in float32 and
rounded once: that alone makes 1.6e-3."""
MANY_ROUNDED = 6e-3
"""Where bfloat16 intermediate results are multiplied, as in attention."""
CODES = 4.5e-2
"""Of float8 e4m3, with three bits of mantissa: rounding makes 2.6e-2, of few values up to half as
much again."""
SUMMED = 1e-4
"""Of float32 results that are not rounded further; sums of another order make less."""
SAME = 0.0

Result = tuple[torch.Tensor, torch.Tensor, float]
"""What the kernel left, what it should be, and the error allowed."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one size."""

    op: str
    sizes: str
    launch: Callable[[int], Any]
    """Runs the kernel; other numbers take other data."""
    results: Callable[[], Iterable[Result]]
    """To be called after `launch(0)` alone."""
    num_bytes: float = 0.0
    """That it has to move, at least."""
    num_flops: float = 0.0
    matmul_speed: float = 1.0
    """How much faster the card computes these operations than those of bfloat16."""
    other: Callable[[int], Any] | None = None
    """Another way to the same, to compare times with."""
    other_name: str = "torch ms"


@dataclass(frozen=True, slots=True)
class Place:
    """Where cases run, and how large they are."""

    device: str
    small: bool
    """For Triton's interpreter."""
    quick: bool
    _generators: dict[str, torch.Generator] = field(default_factory=dict)

    def randn(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, device=self.device, generator=self._generator()) * scale
        return values.to(dtype)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """From 0 to below `high`."""
        return torch.randint(
            high, shape, device=self.device, dtype=dtype, generator=self._generator()
        )

    def poisoned(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        """To be written by a kernel: NaN, or numbers that nothing makes."""
        if dtype.is_floating_point:
            return torch.full(shape, torch.nan, device=self.device).to(dtype)
        return torch.full(shape, -7, device=self.device, dtype=dtype)

    def sets(self, num_bytes: int) -> range:
        """How many sets of data of that size exceed the caches together."""
        return range(1 if self.small else min(max((192 << 20) // num_bytes, 1), 64))

    def pick(self, large: list[Any], small: list[Any]) -> list[Any]:
        """Sizes: of real models, or for the interpreter; with `quick` the first and the last."""
        if self.small:
            return small
        return [large[0], large[-1]] if self.quick and len(large) > 2 else large

    def _generator(self) -> torch.Generator:
        if self.device not in self._generators:
            generator = torch.Generator(self.device)
            self._generators[self.device] = generator.manual_seed(0)
        return self._generators[self.device]
