"""Settings of low-rank adapters."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.config.argument_types import at_least
from tokenmill.config.dtypes import canonical_dtype
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig, LoRAConfig
from tokenmill.errors import ConfigError, shown

MAX_RANK = {"cpu": 512, "cuda": 128}
"""Of the kernels of a device."""


def resolve_lora(args: EngineArgs, dtype: str, device: str) -> LoRAConfig | None:
    """The settings beside activations of this dtype; None without `enable_lora`.

    Raises `ConfigError` that names the setting.
    """
    if not args.enable_lora:
        return None
    max_loras = at_least("max_loras", args.max_loras, 1)
    max_rank = at_least("max_lora_rank", args.max_lora_rank, 1)
    if max_rank > MAX_RANK[device]:
        raise ConfigError(
            f"max_lora_rank={max_rank} must be at most {MAX_RANK[device]} with device={device!r}."
        )
    max_cpu_loras = max_loras
    if args.max_cpu_loras is not None:
        max_cpu_loras = at_least("max_cpu_loras", args.max_cpu_loras, 1)
        if max_cpu_loras < max_loras:
            raise ConfigError(
                f"max_cpu_loras={max_cpu_loras} is less than max_loras={max_loras}, but adapters"
                f" at work are kept on the host as well; raise it to {max_loras}, or leave it out."
            )
    return LoRAConfig(
        max_loras=max_loras,
        max_lora_rank=max_rank,
        max_cpu_loras=max_cpu_loras,
        dtype=_dtype(args.lora_dtype, dtype, device),
        target_modules=_target_modules(args.lora_target_modules),
    )


def check_adapted_model(config: EngineConfig) -> None:
    """Raise `ConfigError` if there are to be adapters, and this model takes none."""
    model = config.model
    if config.lora is None:
        return
    if model.implementation != "tokenmill":
        raise ConfigError(
            f"enable_lora: {model.architecture} runs on the code of {model.implementation}, whose"
            f" layers take no adapters here; merge the adapter into the weights and leave it out."
        )


def _dtype(given: str, activations: str, device: str) -> str:
    if given == "auto":
        return activations
    dtype = canonical_dtype(given)
    if dtype != activations and (device != "cpu" or "float16" in (dtype, activations)):
        raise ConfigError(
            f"lora_dtype={given!r} is not the activations' type, {activations}, which the kernels"
            f" for it need; use lora_dtype='auto'."
        )
    return dtype


def _target_modules(given: Sequence[object] | None) -> tuple[str, ...]:
    names = []
    for each in given or ():
        if not isinstance(each, str) or not each:
            raise ConfigError(
                f"lora_target_modules holds {shown(each)}; give names of modules, such as q_proj."
            )
        names.append(each)
    return tuple(names)
