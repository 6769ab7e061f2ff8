"""Puts `tests/` on the path, so that tests share `helpers`, and finds the default model."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
