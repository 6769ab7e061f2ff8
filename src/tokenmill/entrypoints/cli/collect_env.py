"""`tokenmill collect-env`: what a bug report needs to say about a machine, and no more."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import tokenmill
from tokenmill.config.machine import read_machine
from tokenmill.observe.environment import VARIABLES

DISTRIBUTIONS = ("torch", "numpy", "tokenizers", "safetensors", "huggingface-hub", "msgspec")
INSTRUCTION_SETS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)
OTHER_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "HF_HUB_OFFLINE")
"""Variables of libraries that change how fast we run or what we can fetch. None holds a secret."""


def collect_env() -> int:
    """Print versions, processor, memory, limits and the build of torch. No secrets."""
    for name, value in facts().items():
        print(f"{name}: {value}")
    return 0


def facts() -> dict[str, str]:
    """Name to value, in the order of printing."""
    import torch

    machine = read_machine()
    cpu = _cpu_info()
    versions = {name: _version(name) for name in DISTRIBUTIONS}
    environment = {
        name: os.environ[name] for name in (*VARIABLES, *OTHER_VARIABLES) if name in os.environ
    }
    return {
        "tokenmill": tokenmill.__version__,
        "python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})",
        "system": platform.platform(),
        **versions,
        "torch cpu capability": torch.backends.cpu.get_cpu_capability(),
        "torch threads": str(torch.get_num_threads()),
        "torch cuda": str(torch.version.cuda),
        "cpu": cpu.get("model name", platform.processor() or "unknown"),
        "instruction sets": " ".join(_instruction_sets(cpu)) or "unknown",
        "cpus": f"{machine.num_cpus} usable of {os.cpu_count()}",
        "memory": (
            f"{machine.available_memory / 1e9:.1f} GB available of {machine.total_memory / 1e9:.1f}"
            f" GB (limits of the container included)"
        ),
        **environment,
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_info() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty where there is no such file."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text().split("\n\n")[0]
    pairs = [line.split(":", 1) for line in first.splitlines() if ":" in line]
    return {name.strip(): value.strip() for name, value in pairs}


def _instruction_sets(cpu: dict[str, str]) -> list[str]:
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    return [name for name in INSTRUCTION_SETS if name in flags]
