"""What this machine offers the process: processors and memory, as far as its container allows.

The numbers come from the kernel's files (`/proc/meminfo`, `/sys/fs/cgroup`) and the process's
affinity. `root` is another directory in tests.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

_UNLIMITED = 1 << 60
"""cgroup v1 writes a number near 2^63 for "no limit"."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A GPU."""

    name: str
    capability: tuple[int, int]
    """CUDA compute capability, such as (9, 0)."""
    total_memory: int
    """Bytes."""
    available_memory: int
    """Bytes that nobody has taken yet."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Processors and memory at hand."""

    num_cpus: int
    """Processors that the process may use: its affinity, and its container's quota."""
    total_memory: int
    """Bytes of memory, or the container's limit if that is lower."""
    available_memory: int
    """Bytes that can be taken now without swapping or meeting the container's limit."""
    isa: str = "reference"
    """What the kernels run on: `kernels.native.Isa`, of which `reference` is torch."""
    accelerator: Accelerator | None = None
    no_accelerator: str = "none was looked for"
    """Why there is none."""

    def shared_by(self, num_replicas: int) -> Machine:
        """What each of so many replicas has of it: processors and memory are divided, while each
        has a GPU of its own.
        """
        return replace(
            self,
            num_cpus=max(self.num_cpus // num_replicas, 1),
            total_memory=self.total_memory // num_replicas,
            available_memory=self.available_memory // num_replicas,
        )


def read_machine(root: Path = Path("/"), *, isa: str = "reference") -> Machine:
    """Look at the machine, now; `isa` is what the kernels have found. GPUs are not looked for."""
    total, available = _system_memory(root)
    for directory in _cgroups(root, "memory"):
        limit, used = _memory_limit(directory)
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for directory in _cgroups(root, "cpu"):
        cpus = min(cpus, _cpu_quota(directory))
    return Machine(max(cpus, 1), total_memory=total, available_memory=available, isa=isa)


def _system_memory(root: Path) -> tuple[int, int]:
    """(total, available) bytes of the whole machine."""
    text = _read(root / "proc/meminfo")
    if text is None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total // 2
    kib = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines() if ":" in line}
    return kib["MemTotal"] << 10, kib.get("MemAvailable", kib["MemFree"]) << 10


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Directories of the process's control groups, from its own up to the root: all of their
    limits hold.
    """
    found = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        if controllers:  # version 1: one hierarchy a controller
            if controller not in controllers.split(","):
                continue
            base /= controller
        own = Path(path.lstrip("/"))
        found += [base / part for part in (own, *own.parents)]
    return [directory for directory in dict.fromkeys(found) if directory.is_dir()]


def _memory_limit(directory: Path) -> tuple[int, int]:
    """(limit, used) bytes of one control group; page cache that can be dropped is not used."""
    limit = _number(directory / "memory.max") or _number(directory / "memory.limit_in_bytes")
    used = _number(directory / "memory.current") or _number(directory / "memory.usage_in_bytes")
    stat = dict(
        line.split(" ", 1) for line in (_read(directory / "memory.stat") or "").splitlines()
    )
    cache = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
    return min(limit or _UNLIMITED, _UNLIMITED), max((used or 0) - cache, 0)


def _cpu_quota(directory: Path) -> int:
    """Whole processors that the group's quota amounts to."""
    text = _read(directory / "cpu.max")
    if text is not None:
        quota, period = text.split()
    else:
        quota = _read(directory / "cpu.cfs_quota_us") or "max"
        period = _read(directory / "cpu.cfs_period_us") or "100000"
    if quota == "max" or int(quota) <= 0:
        return _UNLIMITED
    return max(math.ceil(int(quota) / int(period)), 1)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else None
