"""The machine's limits, read from a made-up file system."""

from __future__ import annotations

import os
from pathlib import Path

from tokenmill.config.machine import read_machine

GIB = 1 << 30


def fake_root(tmp_path: Path, files: dict[str, str]) -> Path:
    files = {
        "proc/meminfo": f"MemTotal: {8 * GIB >> 10} kB\nMemFree: {GIB >> 10} kB\n"
        f"MemAvailable: {6 * GIB >> 10} kB\n",
        **files,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_without_a_container_the_system_counts(tmp_path: Path) -> None:
    machine = read_machine(fake_root(tmp_path, {}))
    assert (machine.total_memory, machine.available_memory) == (8 * GIB, 6 * GIB)
    assert machine.num_cpus == len(os.sched_getaffinity(0))


def test_b036_the_memory_limit_of_a_container_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pod/app"
    machine = read_machine(
        fake_root(
            tmp_path,
            {
                "proc/self/cgroup": "0::/pod/app\n",
                f"{group}/memory.max": str(2 * GIB),
                f"{group}/memory.current": str(GIB),
                f"{group}/memory.stat": f"anon {GIB // 2}\ninactive_file {GIB // 2}\n",
            },
        )
    )
    assert (machine.total_memory, machine.available_memory) == (2 * GIB, 3 * GIB // 2)


def test_the_limit_of_an_outer_group_counts(tmp_path: Path) -> None:
    machine = read_machine(
        fake_root(
            tmp_path,
            {
                "proc/self/cgroup": "0::/pod/app\n",
                "sys/fs/cgroup/pod/app/memory.max": "max",
                "sys/fs/cgroup/pod/memory.max": str(3 * GIB),
                "sys/fs/cgroup/pod/memory.current": str(GIB),
            },
        )
    )
    assert machine.available_memory == 2 * GIB


def test_version_one_groups(tmp_path: Path) -> None:
    machine = read_machine(
        fake_root(
            tmp_path,
            {
                "proc/self/cgroup": "5:memory:/app\n3:cpu,cpuacct:/app\n",
                "sys/fs/cgroup/memory/app/memory.limit_in_bytes": str(2 * GIB),
                "sys/fs/cgroup/memory/app/memory.usage_in_bytes": "0",
                "sys/fs/cgroup/cpu/app/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/app/cpu.cfs_period_us": "100000",
            },
        )
    )
    assert machine.available_memory == 2 * GIB
    assert machine.num_cpus == 1


def test_b037_a_quota_rounds_up_to_whole_processors(tmp_path: Path) -> None:
    cgroup = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000"}
    assert read_machine(fake_root(tmp_path, cgroup)).num_cpus == 1


def test_b037_the_affinity_counts() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert read_machine().num_cpus == 1
    finally:
        os.sched_setaffinity(0, before)


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    cgroup = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "max 100000",
        "sys/fs/cgroup/memory.max": "max",
    }
    machine = read_machine(fake_root(tmp_path, cgroup))
    assert machine.available_memory == 6 * GIB
