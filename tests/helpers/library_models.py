"""The small models of `transformers_families.py`, as transformers makes and saves them."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from helpers.transformers_families import LIBRARY_FAMILIES, LibraryFamily
from tokenmill import LLM


def family_named(name: str) -> LibraryFamily:
    (family,) = (each for each in LIBRARY_FAMILIES if each.name == name)
    return family


@functools.cache
def reference(name: str) -> Any:
    """transformers' model with random weights everywhere, biases and norms included."""
    family = family_named(name)
    return random_model(family.architecture, family.settings())


def random_model(architecture: str, settings: dict[str, Any]) -> Any:
    cls = getattr(transformers, architecture)
    torch.manual_seed(3)
    model = cls(cls.config_class(**settings, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 or parameter_name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@functools.cache
def saved(name: str) -> Path:
    """The directory of a family's model, written by transformers."""
    return save(reference(name))


def save(model: Any) -> Path:
    path = Path(tempfile.mkdtemp(prefix="tokenmill-library-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    model.save_pretrained(path)
    return path


@torch.inference_mode()
def reference_logits(name: str, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), vocab_size]"""
    found: torch.Tensor = reference(name)(torch.tensor([ids])).logits[0]
    return found


def library_engine(path: Path, dtype: str, **settings: Any) -> LLM:
    """An engine that runs the model at `path` on transformers' code."""
    defaults: dict[str, Any] = {
        "model_impl": "transformers",
        "num_kv_blocks": 32,
        "max_model_len": 256,
        "skip_tokenizer_init": True,
        "device": "cpu",
    }
    return LLM(str(path), dtype=dtype, **(defaults | settings))
