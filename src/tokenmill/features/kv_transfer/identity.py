"""The root of block hashes where KV is shared: equal only if equal tokens have equal bytes.

Everything that the bytes of a block depend on besides its tokens goes into it: the model's weights
and config, what they were made into while they were loaded, the layout and the type of the cache,
the kernels and their build. Engines that differ in any of it never find each other's blocks. With a
secret, nobody who lacks it can tell what a block's name would be.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.metadata
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import tokenmill
from tokenmill.checkpoint.checkpoint import Checkpoint
from tokenmill.config.engine_config import EngineConfig
from tokenmill.kernels import native
from tokenmill.observe.environment import cache_directory

logger = logging.getLogger(__name__)

_FORMAT = 1
"""Of blocks as bytes, and of this."""
_WORTH_TELLING = 2.0
"""Seconds."""


def hash_root(
    config: EngineConfig, checkpoint: Checkpoint, layout: Mapping[str, Any], secret: bytes
) -> bytes:
    """32 bytes; `layout` says what the cache of this model looks like, in values that JSON has."""
    model, lora = config.model, config.lora
    facts = {
        "format": _FORMAT,
        "version": tokenmill.__version__,
        "torch": torch.__version__,
        "kernels": [config.kernels, _kernels_digest(config.kernels), _device_name(config.device)],
        "byteorder": sys.byteorder,
        "weights": weights_digest(checkpoint, config.seed),
        "config": dict(model.hf_config),
        "architecture": [model.architecture, *_code(model.implementation)],
        "dtype": [model.dtype, config.quantization],
        "exact": config.exact,
        "adapters": None if lora is None else [lora.dtype, list(lora.target_modules)],
        "max_model_len": model.max_model_len,
        "layout": dict(layout),
    }
    text = json.dumps(facts, sort_keys=True, default=repr)
    return hmac.digest(secret or b"none", text.encode(), "sha256")


def weights_digest(checkpoint: Checkpoint, seed: int) -> str:
    """Hex SHA-256 of the files that hold the model's weights.

    A file is read once: its digest is kept in the cache directory for as long as size, time and
    place of the file stay what they are. Dummy weights are a function of `seed` and their shapes.
    """
    files = {each.file.path for name in checkpoint.tensor_shapes
             for each in checkpoint.file_ranges(name)}  # fmt: skip
    if not files:
        shapes = json.dumps(sorted(checkpoint.tensor_shapes.items()))
        return hashlib.sha256(f"dummy {seed} {shapes}".encode()).hexdigest()
    digests = (_kept_digest(path) for path in sorted(files, key=lambda path: path.name))
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _kept_digest(path: Path) -> str:
    real = path.resolve()
    state = real.stat()
    what = f"{real} {state.st_size} {state.st_mtime_ns} {state.st_ino}"
    kept = cache_directory() / "digests" / hashlib.sha256(what.encode()).hexdigest()
    try:
        return kept.read_text()
    except OSError:
        pass
    begin = time.monotonic()
    with real.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if (seconds := time.monotonic() - begin) > _WORTH_TELLING:
        logger.info("KV transfer: %s was read once to know it, in %.0f s", path, seconds)
    _write_atomically(kept, digest)
    return digest


def _write_atomically(path: Path, text: str) -> None:
    """Without it, the next start reads the file again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        beside.write_text(text)
        beside.replace(path)
    except OSError as error:
        logger.warning("KV transfer: %s cannot be written: %s", path, error)


def _kernels_digest(kernels: str) -> str:
    """Of the compiled kernels; of those in Python, torch's and our version speak."""
    if not native.is_available() or kernels in ("reference", "triton"):
        return kernels
    path = native.module().__file__
    assert path is not None
    return _kept_digest(Path(path))


def _code(implementation: str) -> list[str]:
    """Whose code the model runs on, and which version of it; that of our own is told already."""
    if implementation == "tokenmill":
        return [implementation]
    return [implementation, importlib.metadata.version(implementation)]


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device
