"""Code blocks of the documentation, for tests that follow a page."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def python_files(page: str) -> dict[str, str]:
    """The Python blocks of a page whose first line names a file, by that name."""
    text = (DOCS / page).read_text()
    return dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", text, re.DOTALL))
