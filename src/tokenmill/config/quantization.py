"""Which matrices of a plain checkpoint become fewer bits while they are loaded, and where."""

from __future__ import annotations

from tokenmill.config.device import NATIVE_KERNELS
from tokenmill.errors import ConfigError, did_you_mean

GPU_QUANTIZATIONS = ("fp8", "int4")
CPU_QUANTIZATIONS = ("int8", "int4")
QUANTIZATIONS = ("fp8", "int8", "int4")


def choose_quantization(wanted: str | None, device: str, dtype: str, kernels: str) -> str | None:
    """`wanted`, if matrices can have it there. Raises `ConfigError`."""
    if wanted is None:
        return None
    if wanted not in QUANTIZATIONS:
        raise ConfigError(
            f"quantization={wanted!r} is not one of: {', '.join(QUANTIZATIONS)}."
            f"{did_you_mean(wanted, QUANTIZATIONS)}"
        )
    if device == "cuda":
        possible, place = GPU_QUANTIZATIONS, "a GPU"
        runs = dtype == "bfloat16"
    else:
        possible, place = CPU_QUANTIZATIONS, "a CPU"
        runs = dtype == "bfloat16" and kernels in NATIVE_KERNELS
    if wanted not in possible:
        raise ConfigError(
            f"quantization={wanted!r} needs device={'cpu' if device == 'cuda' else 'cuda'!r}; this"
            f" engine has device={device!r}. On {place}, take {' or '.join(possible)}."
        )
    if not runs:
        raise ConfigError(
            f"quantization={wanted!r} needs dtype='bfloat16' and, on a CPU, the native kernels;"
            f" this engine has device={device!r} and dtype={dtype!r}, and runs on the {kernels}"
            f" kernels."
        )
    return wanted
