"""Less work for tests that run under an emulator, fifty times slower: scripts/check-aarch64.sh."""

from __future__ import annotations

import os

IS_EMULATED = os.environ.get("TOKENMILL_EMULATED") == "1"


def affordable(count: int) -> int:
    """`count`, or a quarter of it under an emulator; at least 1."""
    return max(count // 4, 1) if IS_EMULATED else count
