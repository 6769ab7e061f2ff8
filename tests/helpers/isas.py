"""Instruction sets of this machine, by what they have kernels of their own for.

Levels above the last of each share its kernels, so that testing them would be the same again.
"""

from __future__ import annotations

from tokenmill.kernels import native

OF_ROWS = [isa for isa in native.isas() if isa in ("portable", "neon", "avx2", "avx512")]
"""Norms, gates, sampling, routing, bans."""
OF_ATTENTION = [isa for isa in native.isas() if isa in (*OF_ROWS, "amx")]
