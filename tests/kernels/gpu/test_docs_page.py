"""docs/add-a-gpu-kernel.md, followed to the letter in a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(folder: Path, *arguments: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    """Run Python where modules of tokenmill.kernels.gpu come from the folder, too."""
    paths = [folder, ROOT / "tests" / "kernels" / "gpu", ROOT / "tests"]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([*map(str, paths), env.get("PYTHONPATH", "")])
    if interpret:
        env["TRITON_INTERPRET"] = os.environ["TRITON_INTERPRET"]
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=env
    )


def test_the_page_works(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "add-a-gpu-kernel.md").read_text()
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.DOTALL)
    assert [path for path, _ in blocks] == [
        "src/tokenmill/kernels/gpu/row_division.py",
        "tests/kernels/gpu/test_row_division.py",
    ]
    for path, text in blocks:
        (tmp_path / Path(path).name).write_text(text)
    (tmp_path / "with_folder.py").write_text(
        f"from tokenmill.kernels import gpu\ngpu.__path__.append({str(tmp_path)!r})\n"
    )

    # `conftest` is the one of this directory, which has the fixture `device`.
    options = ("-m", "pytest", "-p", "with_folder", "-p", "conftest", "-c", os.devnull)
    test = str(tmp_path / "test_row_division.py")
    tested = run(tmp_path, *options, f"--rootdir={tmp_path}", test, interpret=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "13 passed" in tested.stdout

    code = "import with_folder; from tokenmill.kernels.gpu.compile import main; main()"
    checked = run(tmp_path, "-c", code, "row_division", interpret=False)
    assert checked.returncode == 0, checked.stderr
    name, size, registers, stack, *_ = checked.stdout.splitlines()[-1].split()
    assert (name, size, int(stack)) == ("divide_rows", "4096", 0)
    assert int(registers) > 0
