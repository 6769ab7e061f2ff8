"""From a new process to its first token.

Each measurement is a process of its own (`startup_probe.py`), so that nothing is warm but the
files in the system's cache; a first process, which does not count, warms these and has Python write
its bytecode. The clock of a process and this one's are the same: the system's monotonic one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import msgspec

from tokenmill.config.engine_args import EngineArgs
from tokenmill.entrypoints.bench.options import StartupOptions
from tokenmill.errors import ConfigError

ALLOWANCE = 450 << 20
"""Bytes of anonymous memory that a process may take beside weights and KV cache: the interpreter,
torch, buffers of a step."""

IMPORT_TORCH = "import torch"
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"


class Sample(msgspec.Struct):
    """What one process reports."""

    stages: dict[str, float]
    """Seconds, in order. What is done in a second thread meanwhile is not among them."""
    to_first_token: float
    """Seconds from the end of `import torch` to the first token."""
    first_token_time: float
    """On the monotonic clock."""
    anonymous_bytes: int
    weight_bytes: int
    kv_pool_bytes: int
    on_host: bool
    """Whether weights and KV cache lie in the memory that `anonymous_bytes` counts."""
    checkpoint_bytes: int
    read_bandwidth: float
    """Bytes per second, on a buffer of the checkpoint's size."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes after the first token."""

    anonymous: int
    """Of the process: all that is no file."""
    weights: int
    """As the engine holds them."""
    kv_pool: int
    """The whole pool; the system gives a page of it when it is first written."""
    limit: int
    """Weights, pool and the allowance."""
    beside_weights: int
    """Anonymous memory without the weights; the pool is nearly unused, so this is compared with
    the allowance alone."""
    allowance: int


@dataclass(frozen=True, slots=True)
class StartupReport:
    """What `tokenmill bench startup` says: medians of several processes."""

    stages: dict[str, float]
    """Seconds, in order."""
    to_first_token: float
    """From the end of `import torch`."""
    whole: float
    """From the start of the process."""
    checkpoint_bytes: int
    load_limit_seconds: float
    """Reading the checkpoint once at the machine's best."""
    memory: MemoryReport | None
    """None where weights and cache lie on a GPU."""


def measure_startup(args: EngineArgs, options: StartupOptions) -> StartupReport:
    """Start processes one after the other. Raises `ConfigError` if one fails."""
    samples, wholes = [], []
    _probe(args)
    for _ in range(options.num_iters):
        begin = time.monotonic()
        sample = _probe(args)
        samples.append(sample)
        wholes.append(sample.first_token_time - begin)
    last = samples[-1]
    in_stages = [sum(sample.stages.values()) for sample in samples]
    before = [whole - stages for whole, stages in zip(wholes, in_stages, strict=True)]
    return StartupReport(
        stages={
            "start Python": median(before),
            **{name: median(s.stages[name] for s in samples) for name in last.stages},
        },
        to_first_token=median(sample.to_first_token for sample in samples),
        whole=median(wholes),
        checkpoint_bytes=last.checkpoint_bytes,
        load_limit_seconds=last.checkpoint_bytes / max(s.read_bandwidth for s in samples),
        memory=_memory(samples) if last.on_host else None,
    )


def _memory(samples: Sequence[Sample]) -> MemoryReport:
    largest = max(samples, key=lambda sample: sample.anonymous_bytes)
    weights, kv_pool = largest.weight_bytes, largest.kv_pool_bytes
    return MemoryReport(
        anonymous=largest.anonymous_bytes,
        weights=weights,
        kv_pool=kv_pool,
        limit=weights + kv_pool + ALLOWANCE,
        beside_weights=largest.anonymous_bytes - weights,
        allowance=ALLOWANCE,
    )


def _probe(args: EngineArgs) -> Sample:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tokenmill.entrypoints.bench.startup_probe",
            msgspec.json.encode(asdict(args)).decode(),
        ],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != _NO_BYTECODE},
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ConfigError(f"The process that was started for the measurement failed: {reason[0]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Sample)
