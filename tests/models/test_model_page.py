"""docs/add-a-model.md, followed to the letter: its table entry, its line, its file."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from helpers.families import FAMILIES, Family
from helpers.family_models import prompt, reference_logits, saved
from helpers.models import PagedRun, model_config
from helpers.pages import DOCS, python_files
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import ConfigError
from tokenmill.models import registry
from tokenmill.models.loader import load_model
from tokenmill.models.registry import get_model_class

PAGE = "add-a-model.md"
FILE = "src/tokenmill/models/olmo2.py"


def short_blocks() -> list[str]:
    """The page's Python blocks of one line."""
    return re.findall(r"```python\n([^\n]+)\n```", (DOCS / PAGE).read_text())


def family_of_the_page() -> Family:
    entry, _ = short_blocks()
    (family,) = eval(entry, {"Family": Family})
    return family


def test_the_entry_is_the_one_in_the_table() -> None:
    family = family_of_the_page()
    (in_table,) = (each for each in FAMILIES if each.name == family.name)
    assert replace(in_table, gguf="") == family  # files of another format are a step of their own


def test_the_page_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    family = family_of_the_page()
    _, line = short_blocks()
    monkeypatch.delitem(registry.MODELS, family.architecture)
    with pytest.raises(ConfigError, match=f"{family.architecture}' are not supported"):
        get_model_class(family.architecture)

    # The page's file, as a module beside those that are there.
    added = ast.literal_eval("{" + line + "}")
    ((architecture, place),) = added.items()
    module_name, _, class_name = place.partition(":")
    assert f"{module_name}.py" == Path(FILE).name
    path = tmp_path / Path(FILE).name
    path.write_text(python_files(PAGE)[FILE])
    module = ModuleType("tokenmill.models.of_the_page")
    exec(compile(path.read_text(), path, "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry.MODELS, architecture, f"of_the_page:{class_name}")
    assert get_model_class(family.architecture) is getattr(module, class_name)

    checkpoint = open_checkpoint(saved(family.name))
    model = load_model(model_config(checkpoint.config), checkpoint)
    assert type(model).__module__ == module.__name__
    ids = prompt(150, 6)
    found = model.compute_logits(PagedRun(model, "float32").prefill("a", ids, chunk=40))
    torch.testing.assert_close(found, reference_logits(family.name, ids), atol=1e-4, rtol=0)
