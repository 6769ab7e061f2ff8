"""Puts `tests/` on the path, so that tests share `helpers`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# Before torch is imported: its threads sleep while they wait. Spinning, they would take the
# processors from each other wherever something else runs beside the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Before triton is imported: without a GPU its kernels run in the interpreter. Where there is one,
# run the tests with TRITON_INTERPRET=0.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Some tests interrupt themselves or their children; whoever runs them in the background of a script
# has the signal ignored, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on how fast the machine is, or what else runs on it.
with contextlib.suppress(ImportError):  # whoever runs tests of kernels only need not have it
    from hypothesis import settings

    settings.register_profile("patient", deadline=None)
    settings.load_profile("patient")
