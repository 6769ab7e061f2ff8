"""Type of the KV cache: what was asked for, or the one that serves the model best (record 24)."""

from __future__ import annotations

from tokenmill.config.device import NATIVE_KERNELS
from tokenmill.config.dtypes import FLOAT8, canonical_kv_dtype
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.memory import Weights
from tokenmill.config.parameters import ModelParameters
from tokenmill.errors import ConfigError

INT8_ARCHITECTURES = ("LlamaForCausalLM",)
"""Families of which it is measured that int8 moves perplexity by less than 0.2% and finds what
bfloat16 finds; of others, keys may have outliers that a scale for a whole head does badly with."""
INT8_HEAD_SIZES = (64, 80, 96, 128, 192, 256)
INT8_BLOCK_UNIT = 32
"""Head sizes and multiples of `block_size` that the native kernels take."""


def choose_kv_dtype(
    args: EngineArgs, weights: Weights, parameters: ModelParameters, kernels: str, block_size: int
) -> tuple[str, str | None]:
    """The type, and why if that was left open and is not simply that of the activations.

    Raises `ConfigError` for a type that these kernels cannot have.
    """
    dtype = weights.dtype
    if args.kv_cache_dtype == "auto":
        if _is_int8_best(args, weights, parameters, kernels, block_size):
            return "int8", "half of bfloat16, and costs little beside weights in blocks"
        return dtype, None
    kv_dtype = canonical_kv_dtype(args.kv_cache_dtype)
    if kv_dtype == dtype:
        return kv_dtype, None
    if kv_dtype == FLOAT8:
        possible, where = kernels == "triton", "a GPU can do"
    else:
        possible = kernels in NATIVE_KERNELS
        where = "the native kernels of a CPU can do, with dtype='bfloat16' or 'float32'"
    if not possible:
        raise ConfigError(
            f"kv_cache_dtype={args.kv_cache_dtype!r} differs from dtype={dtype!r}, which only"
            f" {where}; this engine runs on the {kernels} kernels. Use kv_cache_dtype='auto'."
        )
    return kv_dtype, None


def _is_int8_best(
    args: EngineArgs, weights: Weights, parameters: ModelParameters, kernels: str, block_size: int
) -> bool:
    """Whoever has weights of 4 or 8 bits wants a small and fast engine, and has given up more
    precision than a cache in int8 does; whoever has not keeps every bit.
    """
    return (
        kernels in NATIVE_KERNELS
        and weights.keeps_blocks
        and weights.num_bytes < 1.5 * weights.num_values
        and parameters.architecture in INT8_ARCHITECTURES
        and parameters.head_size in INT8_HEAD_SIZES
        and block_size % INT8_BLOCK_UNIT == 0
        and args.attention_backend in ("auto", "cpu")
        and args.model_impl != "transformers"
        and args.runner != "pooling"
    )
