"""The families' small models, as transformers makes and saves them."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from helpers.families import COMMON, FAMILIES, Family

VOCAB_SIZE = COMMON["vocab_size"]


@functools.cache
def saved(name: str) -> Path:
    """The directory of a family's model, written by transformers."""
    path = Path(tempfile.mkdtemp(prefix="tokenmill-family-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    reference(name).save_pretrained(path)
    return path


@functools.cache
def reference(name: str) -> Any:
    """transformers' model with random weights everywhere, biases and norms included."""
    (family,) = (each for each in FAMILIES if each.name == name)
    return random_model(family)


def random_model(family: Family) -> Any:
    """The same for a family that need not be in the list."""
    config = getattr(transformers, family.config_class)(
        **family.settings(), attn_implementation="eager"
    )
    torch.manual_seed(3)
    model = getattr(transformers, family.architecture)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 or parameter_name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model


@torch.inference_mode()
def reference_logits(name: str, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), vocab_size]"""
    found: torch.Tensor = reference(name)(torch.tensor([ids])).logits[0]
    return found


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
