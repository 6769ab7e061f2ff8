"""Instruction sets of this machine, by what they have kernels of their own for.

Levels above the last of each share its kernels, so that testing them would be the same again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenmill.kernels import native

OF_ROWS = [isa for isa in native.isas() if isa in ("portable", "neon", "avx2", "avx512")]
"""Norms, gates, sampling, routing, bans."""
OF_ATTENTION = [isa for isa in native.isas() if isa in (*OF_ROWS, "amx", "dotprod", "i8mm")]


@contextmanager
def active(isa: str) -> Iterator[str]:
    """The kernels of `isa` run in the block; afterwards it and the threads are what they were."""
    module = native.module()
    before, threads = module.active_isa(), module.num_threads()
    module.set_active_isa(isa)
    try:
        yield isa
    finally:
        module.set_active_isa(before)
        module.set_num_threads(threads)
