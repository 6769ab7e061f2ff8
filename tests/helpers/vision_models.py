"""The families' small models, as transformers saves them, with processor and tokenizer."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch.nn import functional

from helpers.models import model_config
from helpers.tiny_text import EOS, tiny_tokenizer
from helpers.vision_families import IMAGE_TOKEN, TEXT, VISION_FAMILIES, VisionFamily
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.features.multimodal.processing import (
    ImageProcessor,
    ProcessedImage,
    ProcessorFiles,
    make_image_processor,
)
from tokenmill.layers.kernels import LayerKernels
from tokenmill.models.base import SupportsMultiModal
from tokenmill.models.loader import load_model

PROMPT = "The quick brown fox"
TILED = ("LlavaNext", "LlavaOnevision")
"""Beginnings of architectures whose tiles have a dimension of their own."""


def family_of(name: str) -> VisionFamily:
    (found,) = (each for each in VISION_FAMILIES if each.name == name)
    return found


def mark_of(name: str) -> str:
    """The token that stands for an image in a prompt."""
    family = family_of(name)
    return family.mark or family.special_tokens[0]


def one_of_each_kind() -> list[Any]:
    """The families as parameters of a test of an engine's steps; those like others are slow."""
    return [
        pytest.param(each, marks=[pytest.mark.slow] if each.is_like_others else [], id=each.name)
        for each in VISION_FAMILIES
    ]


@functools.cache
def tokenizer_of(name: str) -> Any:
    """The tiny tokenizer with the family's own tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(list(family_of(name).special_tokens))
    return tokenizer


@functools.cache
def reference(name: str) -> Any:
    """transformers' model with random weights everywhere, biases and norms included."""
    family = family_of(name)
    image_token_id = tokenizer_of(name).token_to_id(family.special_tokens[0])
    more = {
        key: image_token_id if value == IMAGE_TOKEN else value for key, value in family.more.items()
    }
    config = getattr(transformers, family.config_class)(
        vision_config=dict(family.tower), text_config={**TEXT, **family.decoder}, **more
    )
    torch.manual_seed(3)
    model = getattr(transformers, family.architecture)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 or parameter_name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    return model


def reference_processor(name: str) -> Any:
    """transformers' image processor."""
    family = family_of(name)
    module, _, class_name = family.processor.partition(":")
    found = importlib.import_module(f"transformers.models.{module}")
    return getattr(found, class_name)(**family.preprocessor)


@functools.cache
def saved(name: str) -> Path:
    """The directory of a family's model, as transformers writes it."""
    path = Path(tempfile.mkdtemp(prefix="tokenmill-vision-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    reference(name).save_pretrained(path)
    reference_processor(name).save_pretrained(path)
    tokenizer_of(name).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    return path


def files_of(name: str, **preprocessor: Any) -> ProcessorFiles:
    """What a front end reads from the directory; `preprocessor` is laid over its settings."""
    path, tokenizer = saved(name), tokenizer_of(name)
    settings = json.loads((path / "preprocessor_config.json").read_text())
    return ProcessorFiles(
        hf_config=open_checkpoint(path).config,
        preprocessor_config={**settings, **preprocessor},
        processor_config={},
        token_id=tokenizer.token_to_id,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
    )


def processor_of(name: str, **preprocessor: Any) -> ImageProcessor:
    """Ours."""
    return make_image_processor(family_of(name).architecture, files_of(name, **preprocessor))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Coloured noise over a slope: every pixel matters."""
    generator = np.random.default_rng(seed)
    slope = np.linspace(0, 128, width)[None, :, None]
    noise = generator.integers(0, 128, (height, width, 3))
    return Image.fromarray((slope + noise).astype(np.uint8))


def tensors(processed: ProcessedImage) -> dict[str, torch.Tensor]:
    """Inputs as the worker hands them to a model."""
    return {name: torch.from_numpy(array) for name, array in processed.inputs.items()}


def load(
    path: Path, dtype: str = "float32", kernels: LayerKernels | None = None
) -> SupportsMultiModal:
    """The model of a directory, on our code."""
    checkpoint = open_checkpoint(path)
    model = load_model(model_config(checkpoint.config, dtype), checkpoint, kernels=kernels)
    assert isinstance(model, SupportsMultiModal)
    return model


def reference_pixels(name: str, image: Image.Image, **options: Any) -> np.ndarray:
    """transformers' pixels of an image, float32 [images, 3, height, width]."""
    inputs = reference_processor(name)(image, return_tensors="np", **options)
    pixels = np.asarray(inputs["pixel_values"])
    if "image_grid_thw" not in inputs:
        return pixels.reshape(-1, *pixels.shape[-3:])
    # Patches, square by square, each twice for two moments.
    (_, rows, columns), patch = inputs["image_grid_thw"][0], family_of(name).tower["patch_size"]
    grid = pixels.reshape(rows // 2, columns // 2, 2, 2, 3, 2, patch, patch)
    np.testing.assert_array_equal(grid[..., 0, :, :], grid[..., 1, :, :])
    in_place = grid[..., 0, :, :].transpose(4, 0, 2, 5, 1, 3, 6)
    return in_place.reshape(1, 3, rows * patch, columns * patch)


@torch.inference_mode()
def reference_logits(name: str, ids: list[int], images: Sequence[Image.Image]) -> torch.Tensor:
    """transformers' for a prompt with placeholders and what follows it: [len(ids), vocab_size]."""
    inputs: dict[str, torch.Tensor] = {}
    if images:
        each = [reference_processor(name)(image, return_tensors="pt") for image in images]
        for key in ("pixel_values", "image_grid_thw", "image_sizes"):
            if key in each[0]:
                is_tiled = family_of(name).architecture.startswith(TILED)
                inputs[key] = _joined([torch.as_tensor(one[key]) for one in each], is_tiled)
    ids = torch.tensor([ids])
    is_image = (ids == reference(name).config.image_token_id).int()
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = is_image
    elif family_of(name).architecture.startswith("Gemma3"):
        inputs["token_type_ids"] = is_image
    found: torch.Tensor = reference(name)(ids, **inputs).logits[0]
    return found


def _joined(tensors: list[torch.Tensor], is_tiled: bool) -> torch.Tensor:
    """Images behind one another; smaller ones are filled up with zeros, as processors do."""
    if is_tiled and tensors[0].ndim == 5:  # [images, tiles, channels, height, width]
        most = max(each.shape[1] for each in tensors)
        filled = [functional.pad(each, (*[0] * 7, most - each.shape[1])) for each in tensors]
        return torch.cat(filled)
    if tensors[0].ndim == 5:  # [prompts, images, channels, height, width]
        return torch.cat(tensors, dim=1)
    edges = [max(tensor.shape[axis] for tensor in tensors) for axis in (-2, -1)]
    if tensors[0].ndim < 4:
        return torch.cat(tensors)
    return torch.cat(
        [
            functional.pad(each, (0, edges[1] - each.shape[-1], 0, edges[0] - each.shape[-2]))
            for each in tensors
        ]
    )


@torch.inference_mode()
def reference_embeddings(name: str, image: Image.Image, **options: Any) -> torch.Tensor:
    """transformers' embeddings of an image, by its own processor: [n, hidden_size]."""
    inputs = reference_processor(name)(image, return_tensors="pt", **options)
    inputs.pop("pixel_attention_mask", None)
    found = reference(name).get_image_features(**inputs)
    levels = getattr(found, "deepstack_features", None) or []
    if family_of(name).architecture.startswith("InternVL"):  # a tile is as an image
        return found.pooler_output.flatten(0, 1)
    return torch.cat([found.pooler_output[0], *(level[0] for level in levels)], dim=-1)
