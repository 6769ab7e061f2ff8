"""Where the processes of several cores run: each on processors, and a GPU, of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.config.engine_config import EngineConfig
from tokenmill.errors import ConfigError
from tokenmill.kernels.accelerator import visible_gpus


@dataclass(frozen=True, slots=True)
class Placement:
    """What one core's process may use."""

    cpus: tuple[int, ...] = ()
    """Processors that it keeps to; empty is all of this process's."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that differ from this process's."""


ANYWHERE = Placement()
"""Of the only core of an engine."""


def placements(config: EngineConfig) -> list[Placement]:
    """One for each replica. Raises `ConfigError` if there are fewer GPUs than replicas."""
    count = config.data_parallel_size
    if count == 1:
        return [ANYWHERE]
    shares = divided(neighbours(allowed_cpus()), count)
    if config.device == "cpu":
        return [Placement(cpus) for cpus in shares]
    gpus = visible_gpus()
    if len(gpus) < count:
        raise ConfigError(
            f"data_parallel_size={count} needs a GPU for each replica, and {len(gpus)} can be used"
            f" here (CUDA_VISIBLE_DEVICES); use data_parallel_size={max(len(gpus), 1)}."
        )
    return [
        Placement(cpus, {"CUDA_VISIBLE_DEVICES": gpu})
        for cpus, gpu in zip(shares, gpus[:count], strict=True)
    ]


def allowed_cpus() -> list[int]:
    """Processors that this process may use; empty where the system cannot tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def neighbours(cpus: Sequence[int], root: Path = Path("/")) -> list[int]:
    """The processors in an order in which those of one socket and of one core are together."""

    def place(cpu: int) -> tuple[int, int, int]:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        return _number(topology / "physical_package_id"), _number(topology / "core_id"), cpu

    return sorted(cpus, key=place)


def divided(cpus: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """`count` parts that lie together and differ by one at most; none keeps to processors of its
    own where there are not enough.
    """
    if len(cpus) < count:
        return [()] * count
    bounds = [len(cpus) * number // count for number in range(count + 1)]
    return [tuple(cpus[bounds[i] : bounds[i + 1]]) for i in range(count)]


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # another system, or a container that hides it
        return 0
