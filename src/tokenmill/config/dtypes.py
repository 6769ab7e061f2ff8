"""Types of activations and KV cache, by name."""

from __future__ import annotations

from tokenmill.errors import ConfigError, did_you_mean

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

INT8_SCALE_BYTES = 4
"""Of the float32 scale that an int8 cache keeps for each token and head, for K and V apart."""

FLOAT8 = "float8_e4m3fn"

_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}


def canonical_dtype(name: str) -> str:
    """The one name of a dtype, such as `bfloat16` for `bf16`."""
    dtype = _ALIASES.get(name, name)
    if dtype not in DTYPE_BYTES:
        known = ["auto", *DTYPE_BYTES, *_ALIASES]
        raise ConfigError(
            f"dtype={name!r} is not one of: {', '.join(known)}.{did_you_mean(name, known)}"
        )
    return dtype


def canonical_kv_dtype(name: str) -> str:
    """The one name of a type that a KV cache may have."""
    known = ["auto", *DTYPE_BYTES, "int8", "fp8"]
    dtype = {**_ALIASES, "fp8": FLOAT8}.get(name, name)
    if dtype == FLOAT8:
        return dtype
    if dtype not in known[1:]:
        raise ConfigError(
            f"kv_cache_dtype={name!r} is not one of: {', '.join(known)}.{did_you_mean(name, known)}"
        )
    return dtype


def kv_head_bytes(head_size: int, dtype: str) -> int:
    """Bytes of one token's K, or V, in one head of a KV cache of `dtype`."""
    if dtype == "int8":
        return head_size + INT8_SCALE_BYTES
    if dtype == FLOAT8:
        return head_size
    return head_size * DTYPE_BYTES[dtype]
