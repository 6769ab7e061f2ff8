"""The GPU, if there is one that the Triton kernels can use.

The driver's own tool is asked, not torch: whoever only plans for a GPU (the front end of a server)
neither imports torch nor takes memory there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess

from tokenmill.config.machine import Accelerator

LOWEST_CAPABILITY = (8, 0)
"""Ampere: bfloat16 in the matrix units."""
_TOOL = "nvidia-smi"
_QUERY = "--query-gpu=name,compute_cap,memory.total,memory.free"
_SECONDS = 20.0


def find_accelerator() -> Accelerator | str:
    """The first visible GPU, or why none can be used."""
    if shutil.which(_TOOL) is None:
        return "this machine has no NVIDIA driver (nvidia-smi is not on the PATH)"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'tokenmill[gpu]'"
    if importlib.metadata.version("torch").endswith("+cpu"):
        return "the torch that is installed is a build for CPUs only"
    first = "0" if visible is None else visible.split(",")[0].strip()
    try:
        return parse_answer(_ask(_QUERY, "--format=csv,noheader,nounits", f"--id={first}"))
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    try:
        return _ask("--query-gpu=index", "--format=csv,noheader").split()
    except (OSError, subprocess.SubprocessError):  # there may be no such tool
        return []


def parse_answer(text: str) -> Accelerator | str:
    """One line of nvidia-smi, such as `NVIDIA H200, 9.0, 143771, 143152`, in MiB."""
    fields = [field.strip() for field in text.strip().splitlines()[0].split(",")]
    try:
        name, capability_text, total, free = fields
        major, _, minor = capability_text.partition(".")
        capability = (int(major), int(minor))
        memory = [int(mebibytes) << 20 for mebibytes in (total, free)]
    except ValueError:
        return f"nvidia-smi gave an answer that we do not know: {text.strip()}"
    if capability < LOWEST_CAPABILITY:
        lowest = ".".join(map(str, LOWEST_CAPABILITY))
        return f"{name} has compute capability {capability_text}; {lowest} is the lowest supported"
    return Accelerator(name, capability, total_memory=memory[0], available_memory=memory[1])


def _ask(*arguments: str) -> str:
    """What the driver's tool says. Raises `OSError` and `subprocess.SubprocessError`."""
    command = [_TOOL, *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    return answer.stdout
