"""Each kernel by itself, in the shapes of a model, beside the limit of the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tokenmill.config.device import NATIVE_KERNELS, keeps_blocks
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.parameters import read_parameters
from tokenmill.engine.build import open_model, settle_config
from tokenmill.entrypoints.bench.kernel_cases import (
    Case,
    attention_cases,
    fused_cases,
    matrix_cases,
)
from tokenmill.entrypoints.bench.limits import Limits, Peak, best_seconds, limits_of
from tokenmill.entrypoints.bench.options import KernelOptions, positive_ints
from tokenmill.errors import ConfigError, did_you_mean
from tokenmill.kernels import native
from tokenmill.kernels.gemm import BLOCK_TYPES

FORMATS = {"bfloat16": ("bf16", *BLOCK_TYPES, "torch"), "float32": ("f32", "torch")}
"""Of the native kernels, by the type of the activations."""


@dataclass(frozen=True, slots=True)
class KernelFigure:
    """One kernel in one shape."""

    group: str
    kernel: str
    shape: str
    num_rows: int
    seconds: float
    num_bytes: int
    """Read from memory or caches, at least."""
    flops: float
    """0 where reading is all that counts."""
    read_bandwidth: float
    """Bytes per second, on a buffer of the size of the data in use."""
    share_of_bandwidth: float
    share_of_peak: float
    share_of_limit: float
    """Of the longer of both."""


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What `tokenmill bench kernels` says."""

    kernels: str
    """Instruction set."""
    num_threads: int
    peaks: dict[str, Peak]
    """By kind of weights: `dense` or `blocks`."""
    figures: list[KernelFigure]


def measure_kernels(args: EngineArgs, options: KernelOptions) -> KernelReport:
    """Measure one kernel after the other. Raises `ConfigError` for formats that are not here."""
    checkpoint = open_model(args, lambda stage, done, total: None)
    try:
        config = settle_config(args, checkpoint)
        own_formats = set(checkpoint.tensor_formats.values())
    finally:
        checkpoint.close()
    _refuse_gpu(config)
    formats = _formats(options, config, own_formats)
    native.set_num_threads(config.num_threads)
    torch.set_num_threads(config.num_threads)
    limits = limits_of("cpu", config.model.dtype)
    peaks = {"dense": limits.peak(blocks=False), "blocks": limits.peak(blocks=True)}
    bandwidths: dict[int, float] = {}
    return KernelReport(
        kernels=config.kernels,
        num_threads=config.num_threads,
        peaks=peaks,
        figures=[
            _measure(case, options.seconds, limits, peaks, bandwidths)
            for case in _cases(config, options, formats)
        ],
    )


def _refuse_gpu(config: EngineConfig) -> None:
    if config.device != "cpu":
        raise ConfigError(
            f"bench kernels measures the CPU's kernels, and device={config.device!r}: add"
            " --device cpu. `bench latency` and `bench throughput` measure steps on a GPU."
        )


def _formats(options: KernelOptions, config: EngineConfig, own: set[str]) -> list[str]:
    is_native = config.kernels in NATIVE_KERNELS
    available = FORMATS[config.model.dtype] if is_native else ("torch",)
    if options.formats == "auto":
        return [available[0], *(each for each in BLOCK_TYPES if each in own and each in available)]
    wanted = options.formats.split(",")
    for each in wanted:
        if each not in available:
            raise ConfigError(
                f"formats: {each!r} is not one of those of the {config.kernels} kernels:"
                f" {', '.join(available)}.{did_you_mean(each, available)}"
            )
    return wanted


def _cases(config: EngineConfig, options: KernelOptions, formats: list[str]) -> Iterator[Case]:
    sizes = read_parameters(config.model.hf_config)
    rows = positive_ints("rows", options.rows)
    yield from matrix_cases(sizes, rows, formats)
    if keeps_blocks(config.kernels, config.model.dtype):
        contexts = positive_ints("contexts", options.contexts)
        yield from attention_cases(sizes, rows, contexts, config.cache.block_size)
        yield from fused_cases(sizes, rows)


def _measure(
    case: Case,
    seconds: float,
    limits: Limits,
    peaks: Mapping[str, Peak],
    bandwidths: dict[int, float],
) -> KernelFigure:
    size = 1 << (case.working_set - 1).bit_length()  # limits of like sizes are measured once
    if size not in bandwidths:
        bandwidths[size] = limits.read_bandwidth(case.working_set)
    bandwidth, best = bandwidths[size], best_seconds(case.call, seconds)
    peak = peaks["blocks" if case.kernel in BLOCK_TYPES else "dense"]
    reading, computing = case.num_bytes / bandwidth, case.flops / peak.flops
    return KernelFigure(
        group=case.group,
        kernel=case.kernel,
        shape=case.shape,
        num_rows=case.num_rows,
        seconds=best,
        num_bytes=case.num_bytes,
        flops=case.flops,
        read_bandwidth=bandwidth,
        share_of_bandwidth=reading / best,
        share_of_peak=computing / best,
        share_of_limit=max(reading, computing) / best,
    )
