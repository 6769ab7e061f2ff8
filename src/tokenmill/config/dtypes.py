"""Types of activations and KV cache, by name."""

from __future__ import annotations

from tokenmill.errors import ConfigError, did_you_mean

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

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
