"""Pages say what the code does."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import tokenmill.entrypoints.http.errors  # noqa: F401 (whose classes are looked up)
from tokenmill.errors import TokenmillError, UnknownArgumentError

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def test_the_settings_page_is_fresh() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert (ROOT / "docs" / "settings.md").read_text() == generator["render"](), "run `make docs`"


def test_the_page_of_models_is_fresh() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_models.py"))
    assert (ROOT / "docs" / "models.md").read_text() == generator["render"](), "run `make docs`"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    links = [part.split(")")[0] for part in text.split("](")[1:]]
    for link in links:
        if not link.startswith(("http", "#")):
            assert ((ROOT / page).parent / link.split("#")[0]).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_curl_says_that_it_sends_json(page: str) -> None:
    text = (ROOT / page).read_text().replace("\\\n", " ")
    for command in re.findall(r"^curl .*", text, re.MULTILINE):
        if re.search(r" (-d|--data) ", command):
            assert "content-type: application/json" in command, command


def test_every_error_of_the_server_is_in_the_table_of_its_page() -> None:
    rows = re.findall(
        r"^\| ([0-9, ]+) \| (.*) \|", (ROOT / "docs/serving.md").read_text(), re.MULTILINE
    )
    answered = [kind for kind in _subclasses(TokenmillError) if kind.http_status != 500]
    assert len(answered) > 10
    for kind in answered:
        if kind is not UnknownArgumentError:  # of calls in Python
            assert any(
                str(kind.http_status) in statuses and f"`{kind.code}`" in codes
                for statuses, codes in rows
            ), kind


def _subclasses(kind: type[TokenmillError]) -> list[type[TokenmillError]]:
    return [each for child in kind.__subclasses__() for each in (child, *_subclasses(child))]


def test_every_adr_has_the_same_parts() -> None:
    pages = sorted((ROOT / "docs" / "adr").glob("*.md"))
    assert pages
    for page in pages:
        text = page.read_text()
        for part in ("## Problem", "## Choice", "## Alternatives", "## Cost"):
            assert part in text, f"{page.name} lacks {part}"
