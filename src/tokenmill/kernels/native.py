"""The compiled kernels, `tokenmill._native`: whether they are there, and for which instructions.

Nothing else imports the module. It is absent where it could not be built, for lack of a compiler,
and idle where TOKENMILL_ISA=reference asks for torch. Then the torch kernels run: the same
interface, much slower.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType
from typing import Literal, cast

from tokenmill.errors import ConfigError

logger = logging.getLogger(__name__)

Isa = Literal["amx", "avx512", "avx2", "portable", "i8mm", "dotprod", "neon", "reference"]
"""Instruction set in use. On x86-64: AMX tiles beside AVX-512; AVX-512 with VNNI and BF16; AVX2
with FMA and F16C; vectors of 128 bits as the compiler has them, which serve any other architecture,
too. On aarch64: matrix products of bytes and of bf16; dot products of bytes; NEON. Or torch."""

_LOST = (
    "Matrix products and attention run on torch: about 2 to 10 times slower, and block formats"
    " are expanded to bfloat16 in memory."
)


def active_isa() -> Isa:
    """The instruction set that kernels use. What is lost is logged once, if anything is.

    Raises ConfigError if TOKENMILL_ISA names no instruction set, or one this machine lacks.
    """
    module = _load()
    if module is None:
        return "reference"
    try:
        return cast(Isa, module.active_isa())
    except RuntimeError as error:
        raise ConfigError(str(error)) from None


def isas() -> tuple[Isa, ...]:
    """The instruction sets that this machine has kernels for, from the lowest to the highest.

    All of them can be asked for by TOKENMILL_ISA.
    """
    module = _load()
    if module is None:
        return ()
    names = module.isas()
    return tuple(names[1 : names.index(module.detected_isa()) + 1])


def is_available() -> bool:
    """Whether the native kernels can be used here."""
    return active_isa() != "reference"


def set_num_threads(count: int) -> None:
    """Threads of the kernels, the caller's included; nothing where they cannot be used."""
    if is_available():
        module().set_num_threads(count)


def module() -> ModuleType:
    """`tokenmill._native`. Raises ConfigError where it cannot be used; ask `is_available` first."""
    loaded = _load()
    if loaded is None or not is_available():
        raise ConfigError("The native kernels cannot be used here; take the torch kernels instead.")
    return loaded


@functools.cache
def _load() -> ModuleType | None:
    try:
        loaded = importlib.import_module("tokenmill._native")
    except ImportError as error:
        logger.warning(
            "The native kernels are not installed (%s). %s Install tokenmill from source with a"
            " C++17 compiler to have them.",
            error,
            _LOST,
        )
        return None
    return loaded
