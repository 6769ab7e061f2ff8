"""Which matrices of a plain checkpoint become fewer bits while they are loaded, and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tokenmill.checkpoint.checkpoint import PACKED_PREFIX
from tokenmill.config.argument_types import one_of
from tokenmill.config.device import NATIVE_KERNELS, keeps_blocks
from tokenmill.config.encoder import read_tensors
from tokenmill.config.memory import Weights
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from tokenmill.config.engine_config import EngineConfig

GPU_QUANTIZATIONS = ("fp8", "int4")
CPU_QUANTIZATIONS = ("int8", "int4")
QUANTIZATIONS = ("fp8", "int8", "int4")

_PACKED_IN = {PACKED_PREFIX + "Q4_1": "int4", PACKED_PREFIX + "Q8_0": "int8"}
"""Format of a packed tensor -> what the others of its checkpoint become; the first one that is
there, since int4 has matrices of eight bits, too.
"""


def choose_quantization(
    wanted: str | None,
    device: str,
    dtype: str,
    kernels: str,
    tensor_formats: Mapping[str, str],
) -> str | None:
    """`wanted`, if matrices can have it there. Raises `ConfigError`.

    By default, what a packed checkpoint holds in plain types becomes what it was packed for: its
    writer leaves to the layers what they change before they quantise it.
    """
    runs = dtype == "bfloat16" and (device == "cuda" or kernels in NATIVE_KERNELS)
    if wanted is None:
        formats = set(tensor_formats.values()) if runs and device == "cpu" else ()
        return next((name for packed, name in _PACKED_IN.items() if packed in formats), None)
    one_of("quantization", wanted, QUANTIZATIONS)
    if device == "cuda":
        possible, place = GPU_QUANTIZATIONS, "a GPU"
    else:
        possible, place = CPU_QUANTIZATIONS, "a CPU"
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


def held_weights(
    shapes: Mapping[str, tuple[int, ...]],
    formats: Mapping[str, str],
    wanted: str | None,
    device: str,
    dtype: str,
    kernels: str,
) -> Weights:
    """A checkpoint's tensors as they will be held. Raises as `choose_quantization` does."""
    quantization = choose_quantization(wanted, device, dtype, kernels, formats)
    return Weights(
        shapes,
        formats,
        dtype,
        keeps_blocks(kernels, dtype),
        quantization,
        keeps_mxfp4=device == "cuda" and dtype == "bfloat16",
    )


def weights_of(
    config: EngineConfig, shapes: Mapping[str, tuple[int, ...]], formats: Mapping[str, str]
) -> Weights:
    """A checkpoint's tensors as an engine of these settings holds them."""
    model = config.model
    shapes = read_tensors(shapes, model.hf_config, takes_images=model.takes_images)
    return held_weights(
        shapes, formats, config.quantization, config.device, config.model.dtype, config.kernels
    )
