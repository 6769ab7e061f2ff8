"""What every kernel module needs: torch ops, the arithmetic of a launch, cases to compile ahead."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# A product and a sum may become one instruction. Triton 3.9 warns where nobody has decided that.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

_library: Any = torch.library  # which has no types
_LIBRARY = _library.Library("tokenmill", "FRAGMENT")


def define_op(schema: str, *, cuda: Callable[..., None], cpu: Callable[..., None]) -> None:
    """Make torch.ops.tokenmill.<name>, dispatched by device: a Triton face and its reference.

    The schema, such as "scale(Tensor x, float factor, Tensor(a!) out) -> ()", marks what is
    written. An op returns nothing, so on tensors without data (tracing) it does nothing.
    """
    assert schema.endswith("-> ()"), "results go to tensors that the caller allocates"
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cuda, "CUDA")
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, _nothing, "Meta")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What an op does to tensors without data."""


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient of positive integers, rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not less than a positive number."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One kernel with the types and constants that a real model launches it with."""

    name: str
    """What the table of `compile.py` calls it."""
    kernel: Any
    """The function that `triton.jit` made."""
    signature: Mapping[str, str]
    """Types of the arguments that are no constants, such as "*bf16", "i32", "i64", "fp32".

    Pointers count as aligned to 16 bytes, as torch allocates; "i32:16" is a multiple of 16, which
    Triton finds out at a launch and needs for vector loads of rows with that stride."""
    constexprs: Mapping[str, Any]
    """All other arguments. An integer that is 1 at the launch, or a None, is one of them."""
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    """Of a thread; what a launch calls `maxnreg`."""
    reads_weights_early: bool = False
    """Whether it loads weights before the kernel in front of it has ended (`overlap.py`)."""
