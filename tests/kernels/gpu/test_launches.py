"""Launches bind and compile as on a GPU, and growing batches do not compile anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]


def test_every_batch_has_the_same_variants() -> None:
    """A variant that is compiled while requests are served stops them for a second."""
    done = subprocess.run(
        [sys.executable, "-m", "helpers.triton_launches"],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )
    assert done.returncode == 0, done.stderr
    batches = [json.loads(line) for line in done.stdout.splitlines()]
    assert batches[0] == {"n": 0}, "no rows, no launch"
    assert [batch.pop("n") for batch in batches[1:]] == [1, 2, 3, 16, 100, 128, 500]
    first, *others = batches[1:]
    assert len(first) == 15, sorted(first)
    for batch in others:
        assert batch == first
