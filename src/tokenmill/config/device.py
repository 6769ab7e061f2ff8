"""Where the model runs, on which kernels, and what that means for the other settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tokenmill.config.argument_types import one_of
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.machine import Machine
from tokenmill.errors import ConfigError

logger = logging.getLogger(__name__)

DEVICES = ("auto", "cpu", "cuda")
NATIVE_KERNELS = ("amx", "avx512", "avx2", "portable", "i8mm", "dotprod", "neon")
FLOAT32_KERNELS = {"amx": "avx512", "i8mm": "neon", "dotprod": "neon"}
"""What serves float32 where the instructions that a level adds multiply none."""
FLOPS_PER_CPU = {
    "amx": 0.4e12, "avx512": 0.25e12, "avx2": 0.1e12, "portable": 0.03e12,
    "i8mm": 0.15e12, "dotprod": 0.06e12, "neon": 0.04e12,
    "reference": 0.1e12,
}  # fmt: skip
"""What a processor computes, roughly, by instruction set; only sizes the default token budget."""
FLOPS_PER_GPU = 4e14


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Settings that are chosen by device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    """Most tokens of a step, if its time allows so many."""
    kv_cache_memory_fraction: float
    block_size: int
    async_scheduling: bool
    exact: bool
    attention_slowness: float
    """How much longer an operation of attention takes than one of a product, roughly; 0 where a
    step stays short however long the past is."""
    shared_step_seconds: float
    """How long a step may take in which requests decode; 0: as long as any."""


DEFAULTS = {
    "cpu": DeviceDefaults(
        128, 2_048, 0.5, 32, async_scheduling=False, exact=True, attention_slowness=1.5,
        shared_step_seconds=0.06,
    ),
    "cuda": DeviceDefaults(
        256, 8_192, 0.9, 64, async_scheduling=True, exact=True, attention_slowness=0.0,
        shared_step_seconds=0.0,
    ),
}  # fmt: skip


def choose_device(args: EngineArgs, machine: Machine) -> tuple[str, str | None]:
    """`cpu` or `cuda`, and why if that was left open. Raises `ConfigError`."""
    device, gpu = one_of("device", args.device, DEVICES), machine.accelerator
    if device == "cuda" and gpu is None:
        raise ConfigError(
            f"device='cuda' cannot be used: {machine.no_accelerator}. Use device='cpu'."
        )
    if device != "auto":
        return device, None
    return ("cpu", f"no GPU: {machine.no_accelerator}") if gpu is None else ("cuda", gpu.name)


def choose_kernels(device: str, dtype: str, machine: Machine) -> str:
    """The name of the kernels that serve `dtype` there."""
    if device == "cuda":
        return "triton"
    if dtype == "float32":
        return FLOAT32_KERNELS.get(machine.isa, machine.isa)
    return machine.isa if dtype == "bfloat16" else "reference"


def keeps_blocks(kernels: str, dtype: str) -> bool:
    """Whether block weights keep their codes; else they become `dtype`."""
    return kernels in NATIVE_KERNELS and dtype == "bfloat16"


def flops_per_second(kernels: str, num_threads: int) -> float:
    """What the kernels compute, roughly."""
    return FLOPS_PER_GPU if kernels == "triton" else FLOPS_PER_CPU[kernels] * num_threads


def choose_exact(args: EngineArgs, device: str) -> bool:
    """Whether results may not depend on how requests are run."""
    if args.exact is None:
        return DEFAULTS[device].exact
    if device == "cpu" and not args.exact:
        logger.info("exact=False has no effect on a CPU: results are exact at no cost.")
        return True
    return args.exact
