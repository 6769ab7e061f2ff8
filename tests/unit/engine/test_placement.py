"""Which processors, and which GPU, each replica has."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.fake_engine import engine_config
from tokenmill.config.machine import Machine
from tokenmill.engine.placement import ANYWHERE, divided, neighbours, placements
from tokenmill.errors import ConfigError


def write_topology(root: Path, places: dict[int, tuple[int, int]]) -> None:
    for cpu, (package, core) in places.items():
        directory = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        directory.mkdir(parents=True)
        (directory / "physical_package_id").write_text(f"{package}\n")
        (directory / "core_id").write_text(f"{core}\n")


def test_threads_of_a_core_and_cores_of_a_socket_stay_together(tmp_path):
    # Two sockets with two cores of two threads, numbered as Linux often does.
    write_topology(tmp_path, {cpu: (cpu // 2 % 2, cpu % 2) for cpu in range(8)})
    order = neighbours(range(8), tmp_path)
    assert order == [0, 4, 1, 5, 2, 6, 3, 7]
    assert divided(order, 2) == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert neighbours([3, 1], tmp_path / "nothing") == [1, 3]


@pytest.mark.parametrize("num_cpus", range(1, 9))
@pytest.mark.parametrize("count", range(1, 5))
def test_parts_are_disjoint_and_even(num_cpus, count):
    parts = divided(range(num_cpus), count)
    assert len(parts) == count
    if num_cpus < count:
        assert set(parts) == {()}
    else:
        assert sorted(cpu for part in parts for cpu in part) == list(range(num_cpus))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_an_only_core_may_run_anywhere():
    assert placements(engine_config()) == [ANYWHERE]


def test_replicas_divide_what_there_is():
    machine = Machine(5, total_memory=100, available_memory=90)
    share = machine.shared_by(2)
    assert (share.num_cpus, share.total_memory, share.available_memory) == (2, 50, 45)
    assert machine.shared_by(8).num_cpus == 1
    cpus = [cpu for each in placements(engine_config(data_parallel_size=2)) for cpu in each.cpus]
    assert sorted(cpus) in ([], sorted(os.sched_getaffinity(0)))


def test_each_replica_has_a_gpu(monkeypatch):
    config = replace(engine_config(data_parallel_size=2), device="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5,7")
    gpus = [each.environment["CUDA_VISIBLE_DEVICES"] for each in placements(config)]
    assert gpus == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"data_parallel_size=2 needs a GPU for each.*=1"):
        placements(config)


def test_gpus_are_counted_by_the_driver(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    tool.chmod(0o755)
    code = "from tokenmill.kernels.accelerator import visible_gpus; print(visible_gpus())"
    environ = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    for path, expected in ((f"{tmp_path}:{os.environ['PATH']}", "['0', '1']"), ("/nowhere", "[]")):
        answer = subprocess.run(
            [sys.executable, "-c", code],
            env={**environ, "PATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        assert answer.stdout.strip() == expected
