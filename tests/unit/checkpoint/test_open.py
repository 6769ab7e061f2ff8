"""What a path is opened as."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from helpers.gguf import tiny_llama, write_llama_gguf
from tokenmill.checkpoint.gguf_checkpoint import GGUFCheckpoint
from tokenmill.checkpoint.hf_directory import HFDirectory
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import CheckpointError, ModelNotFoundError


def test_a_gguf_file_and_a_directory_with_one(tmp_path):
    path = write_llama_gguf(tmp_path / "tiny.gguf", tiny_llama())
    for given in (path, tmp_path):
        checkpoint = open_checkpoint(given)
        assert isinstance(checkpoint, GGUFCheckpoint)
        assert checkpoint.path == path


def test_a_hugging_face_directory(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, HFDirectory)
    assert checkpoint.path == tmp_path


def test_a_directory_with_two_gguf_files_asks_for_one(tmp_path):
    path = write_llama_gguf(tmp_path / "a.gguf", tiny_llama())
    shutil.copy(path, tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_nothing_to_open_says_what_was_looked_for(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"config\.json.*\.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no such file"):
        open_checkpoint(tmp_path / "absent")


@pytest.mark.parametrize("content", [b"", b"PK", b"not a model at all"])
def test_another_kind_of_file_is_refused(tmp_path, content):
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.bin"):
        open_checkpoint(path)


def test_opening_needs_no_torch(tmp_path):
    (tmp_path / "gguf").mkdir()
    write_llama_gguf(tmp_path / "gguf" / "tiny.gguf", tiny_llama())
    tiny_llama().save_pretrained(tmp_path / "hf")
    program = (
        "import sys; from pathlib import Path\n"
        "from tokenmill.checkpoint.open import open_checkpoint\n"
        f"for name in ('gguf', 'hf'): open_checkpoint(Path({str(tmp_path)!r}) / name)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
