"""Pages say what the code does."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_settings_page_is_fresh() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert (ROOT / "docs" / "settings.md").read_text() == generator["render"](), "run `make docs`"


def test_the_page_of_models_is_fresh() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_models.py"))
    assert (ROOT / "docs" / "models.md").read_text() == generator["render"](), "run `make docs`"


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_files_that_a_page_names_exist(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    links = [part.split(")")[0] for part in text.split("](")[1:]]
    for link in links:
        if not link.startswith(("http", "#")):
            assert ((ROOT / page).parent / link.split("#")[0]).exists(), link


def test_every_adr_has_the_same_parts() -> None:
    pages = sorted((ROOT / "docs" / "adr").glob("*.md"))
    assert pages
    for page in pages:
        text = page.read_text()
        for part in ("## Problem", "## Choice", "## Alternatives", "## Cost"):
            assert part in text, f"{page.name} lacks {part}"
