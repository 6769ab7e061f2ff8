"""Triton's interpreter, with the rounding of a GPU, and somewhat faster.

By itself it cuts float32 to bfloat16 instead of rounding, and loses the carry where rounding to
float8 reaches the next power of two: 1.99 becomes 1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH_DTYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@functools.cache
def adapt_interpreter() -> None:
    """Change this process's interpreter in all the ways below, once."""
    _round_like_a_gpu()
    _patch_the_language_once()
    _know_types()
    _loop_over_scalars()
    _check_overflow(False)


@contextmanager
def overflow_is_an_error() -> Iterator[None]:
    """Check every sum, difference and product of integers, for a third of the time."""
    _check_overflow(True)
    try:
        yield
    finally:
        _check_overflow(False)


def _check_overflow(wanted: bool) -> None:
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=wanted)


def _round_like_a_gpu() -> None:
    """Let conversions round to nearest, ties to even; float8 saturates."""
    given = interpreter._convert_float

    def convert(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        if rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ:
            return given(data, source, target, rounding_mode)
        try:
            from_dtype, to_dtype = _TORCH_DTYPES[source], _TORCH_DTYPES[target]
        except KeyError:
            return given(data, source, target, rounding_mode)
        values = torch.frombuffer(bytearray(data.tobytes()), dtype=from_dtype).float()
        if to_dtype in _FLOAT8:
            largest = torch.finfo(to_dtype).max
            values = values.clamp(-largest, largest)
        bits = values.to(to_dtype).view(torch.uint8).numpy()
        return bits.view(f"uint{target.primitive_bitwidth}").reshape(data.shape)

    interpreter._convert_float = convert


def _patch_the_language_once() -> None:
    """Let a kernel's calls of other functions cost less.

    By itself the interpreter goes through all names of the language at every such call, to replace
    what the kernel's launch has replaced already.
    """
    given = interpreter._patch_lang
    replaced: set[int] = {id(tl)}

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        languages = {id(v) for v in function.fn.__globals__.values() if v is tl or v is tl.core}
        if not languages <= replaced:
            given(function.fn)
            replaced.update(languages)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def _know_types() -> None:
    """Look up numpy's types by name; by itself the interpreter makes a table of them each time."""
    given = interpreter._get_np_dtype
    known: dict[str, np.dtype] = {}

    def numpy_dtype(dtype: Any) -> np.dtype:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if element.name not in known:
            known[element.name] = given(element)
        return known[element.name]

    interpreter._get_np_dtype = numpy_dtype


def _loop_over_scalars() -> None:
    """Let `range(n)` take a kernel's argument: Triton 3.6 relies on what numpy 2.4 refuses."""
    given = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        given(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
