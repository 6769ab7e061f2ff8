"""Adapters for a loaded model: every layer that they can change is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.config.engine_config import EngineConfig
from tokenmill.errors import ConfigError
from tokenmill.features.lora.adapter import AdapterReader
from tokenmill.features.lora.adapters import Adapters, HostCache, new_column
from tokenmill.features.lora.sites import Site, find_sites, places
from tokenmill.features.lora.tables import (
    AdaptedLinearMethod,
    NativeStepRows,
    NativeTables,
    SiteTables,
    StepRows,
    TorchStepRows,
    TorchTables,
)
from tokenmill.layers.kernels import uses_native_kernels

StageInto = Callable[[npt.NDArray[np.generic], torch.Tensor], None]
"""Copies a host array into a tensor on the device."""


@dataclass(frozen=True, slots=True)
class OnGpu:
    """Where a GPU's tables lie, and how they are told of a step."""

    device: torch.device
    stage_into: StageInto


def build_adapters(
    config: EngineConfig,
    model: object,
    on_gpu: OnGpu | None = None,
    *,
    whole: object | None = None,
) -> Adapters | None:
    """What the runner tells of its rows; None without `enable_lora`.

    To be called before anything of the model is recorded. Without `on_gpu` it is for the CPU.
    `whole` is the whole model, perhaps without memory, where `model` has some of its layers: files
    are checked against all of them.
    Raises `ConfigError` if the model has no layer that `lora_target_modules` names.
    """
    lora = config.lora
    if lora is None:
        return None
    sites = find_sites(model, lora.target_modules)
    all_sites = sites if whole is None else find_sites(whole, lora.target_modules)
    if not all_sites:
        raise ConfigError(
            f"lora_target_modules={list(lora.target_modules)} names no linear layer of"
            f" {config.model.architecture}. It has: {', '.join(_module_names(whole or model))}."
        )
    slot_of_row = new_column(config.scheduler.max_num_seqs)
    step, tables = _tables(config, sites, slot_of_row, on_gpu)
    for site, each in zip(sites, tables, strict=True):
        method = site.linear.method
        del site.linear.method  # it may be a module, whose place nothing else can take
        site.linear.method = AdaptedLinearMethod(method, each)
    here = {site.name: index for index, site in enumerate(sites)}
    own = {i: here[site.name] for i, site in enumerate(all_sites) if site.name in here}
    reader = AdapterReader(lora, all_sites, places(all_sites, lora.target_modules), own)
    host = HostCache(reader, tables, lora.max_cpu_loras)
    return Adapters(lora, host, tables, step, slot_of_row)


def _tables(
    config: EngineConfig,
    sites: Sequence[Site],
    slot_of_row: npt.NDArray[np.int32],
    on_gpu: OnGpu | None,
) -> tuple[StepRows, Sequence[SiteTables]]:
    lora = config.lora
    assert lora is not None
    num_slots, max_rank = lora.max_loras, lora.max_lora_rank
    dtype: torch.dtype = getattr(torch, lora.dtype)
    if on_gpu is not None:
        from tokenmill.features.lora.gpu import GpuStepRows, GpuTables  # needs triton

        most = max(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs)
        step = GpuStepRows(slot_of_row, most, on_gpu.stage_into, on_gpu.device)
        return step, [GpuTables(site, step, num_slots, max_rank, dtype) for site in sites]
    if uses_native_kernels(config.model.dtype):
        native = NativeStepRows(slot_of_row, num_slots)
        return native, [NativeTables(site, native, num_slots, max_rank, dtype) for site in sites]
    in_torch = TorchStepRows(slot_of_row)
    return in_torch, [TorchTables(site, in_torch, num_slots) for site in sites]


def _module_names(model: object) -> list[str]:
    modules = (module for site in find_sites(model) for module in site.modules)
    return sorted({module.rpartition(".")[2] for module in modules})
