"""The script that tries attention's tiles, where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_script_runs_in_the_interpreter():
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "gpu" / "tune_attention.py"),
            *("--device", "cpu", "--seconds", "0"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    bits = [line for line in done.stdout.splitlines() if " w" in line]
    assert len(bits) == 1
    assert bits[0].endswith("equal"), bits
    assert "decode 2 x 100, exact" in done.stdout
