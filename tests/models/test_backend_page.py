"""docs/add-an-attention-backend.md, followed to the letter in a folder of its own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.family_models import saved
from helpers.pages import python_files
from tokenmill import LLM
from tokenmill.attention import selection
from tokenmill.attention.backend import AttentionSpec
from tokenmill.attention.selection import select_backend
from tokenmill.errors import ConfigError

PAGE = "add-an-attention-backend.md"
NAME = "my_package.one_by_one:OneByOneBackend"
SPEC = AttentionSpec(
    num_heads=6, num_kv_heads=2, head_size=64, scale=0.1, dtype="float32", block_size=32
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files, as a package that can be imported."""
    for name, text in python_files(PAGE).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    for module in [m for m in sys.modules if m.partition(".")[0] == "my_package"]:
        del sys.modules[module]
    return tmp_path


def test_the_page_works(folder: Path) -> None:
    assert list(python_files(PAGE)) == ["my_package/one_by_one.py", "tests/test_one_by_one.py"]
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull)
    done = subprocess.run(
        [sys.executable, *options, f"--rootdir={folder}", str(folder / "tests")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout


def test_a_backend_has_a_name_that_a_package_announces(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced = EntryPoint("one-by-one", NAME, selection.ENTRY_POINTS)
    monkeypatch.setattr(selection, "entry_points", lambda group: [announced])
    backend, reasons = select_backend("one-by-one", SPEC)
    assert backend.name == "one_by_one"
    assert reasons == ("one-by-one: asked for",)
    with pytest.raises(ConfigError) as error:
        select_backend("one-by-on", SPEC)
    assert "Did you mean 'one-by-one'? Known: auto, cpu," in str(error.value)
    assert "reference, one-by-one, or `module:Class`" in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flush_attn", "is unknown. Did you mean 'flash_attn'?"),
        ("my_package.nothing:Backend", "could not be loaded: ModuleNotFoundError"),
        ("my_package.one_by_one:Backend", "could not be loaded: AttributeError"),
        ("my_package.one_by_one:OneByOneImpl", "could not be loaded: TypeError"),
        ("my_package.one_by_one:OneByOneMetadata.__doc__", "is no attention backend: it has no"),
        (f"{NAME}.name", "it has no name, supports_graphs, unsupported_reasons"),
    ],
)
def test_what_is_no_backend_is_refused(folder: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        select_backend(name, SPEC)
    assert words in str(error.value)
    assert f"attention_backend={name!r}" in str(error.value)


def test_a_backend_that_lacks_a_part_is_refused_by_the_part(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("my_package.one_by_one")
    monkeypatch.setattr(module, "half", SimpleNamespace(name="x", make_impl=0), raising=False)
    with pytest.raises(ConfigError) as error:
        select_backend("my_package.one_by_one:half", SPEC)
    lacks = "supports_graphs, unsupported_reasons, get_kv_cache_shape, make_metadata_builder (see"
    assert f"it has no {lacks}" in str(error.value)


def test_layers_that_it_cannot_serve_are_refused_when_the_engine_starts(folder: Path) -> None:
    for family, reason in (
        ("gpt-oss", "it has no attention sinks"),
        ("gemma2", "it has no soft cap of logits"),
        ("deepseek-v2", "values are parts of its keys"),
    ):
        with pytest.raises(ConfigError, match=reason):
            LLM(
                str(saved(family)),
                attention_backend=NAME,
                device="cpu",
                dtype="float32",
                skip_tokenizer_init=True,
                num_kv_blocks=8,
                max_model_len=64,
            )
