"""The images of a model, from its files."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.config.engine_config import EngineConfig
from tokenmill.errors import CheckpointError, ConfigError, InvalidRequestError
from tokenmill.features.multimodal.decoding import INSTALL_PILLOW, has_pillow
from tokenmill.features.multimodal.hashing import as_text, typed_digest
from tokenmill.features.multimodal.processing import (
    ImageProcessor,
    ProcessorFiles,
    make_image_processor,
    takes_images,
)
from tokenmill.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenmill.features.multimodal.images import Images

logger = logging.getLogger(__name__)

_PREPROCESSOR = "preprocessor_config.json"
_PROCESSOR = "processor_config.json"
_SIDE = 64
"""Pixels of an image that is only thought of."""
_MAX_JSON_BYTES = 1 << 22


def build_images(config: EngineConfig, tokenizer: Tokenizer | None) -> Images | None:
    """What the model makes of images; None if it takes none, or lacks what that needs, which is
    logged: texts are answered all the same. Raises `ConfigError` for options that its processor
    does not know.
    """
    model = config.model
    native = model.implementation == "tokenmill"
    if not native or model.pooling or tokenizer is None or not takes_images(model.architecture):
        return None
    from tokenmill.features.multimodal.images import Images  # with all that fetches and decodes

    try:
        files = processor_files(Path(model.path), model.hf_config, tokenizer)
        processor = make_image_processor(model.architecture, files)
        _check_mark(processor, tokenizer)
    except (CheckpointError, ConfigError) as error:
        logger.warning("%s takes no images: %s", model.name, error)
        return None
    if not has_pillow():
        logger.warning("images are refused, as pillow is missing: %s", INSTALL_PILLOW)
    _check_options(processor, config.multimodal.processor_options)
    settings = (files.preprocessor_config, files.processor_config)
    return Images(
        processor,
        config.multimodal,
        identity=typed_digest(model.architecture, *map(as_text, settings)),
        max_model_len=model.max_model_len,
        max_embeds=None if config.encoder is None else config.encoder.encoder_cache_size,
    )


def _check_mark(processor: ImageProcessor, tokenizer: Tokenizer) -> None:
    token, token_id = processor.mark_token, processor.mark_token_id
    if tokenizer.token_to_id(token) != token_id:
        raise ConfigError(
            f"the tokenizer's id of {token!r} is {tokenizer.token_to_id(token)}, and that of the"
            f" model's config {token_id}."
        )


def _check_options(processor: ImageProcessor, options: Mapping[str, Any]) -> None:
    try:
        as_text(options)
        processor.num_tokens(_SIDE, _SIDE, options)
    except InvalidRequestError as error:
        if error.parameter == "mm_processor_kwargs":
            raise ConfigError(str(error)) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"mm_processor_kwargs must be an object of JSON: {error}.") from error


def processor_files(
    directory: Path, hf_config: Mapping[str, Any], tokenizer: Tokenizer
) -> ProcessorFiles:
    """Raises `CheckpointError` for a file that is damaged."""
    processor = _read_json(directory / _PROCESSOR)
    preprocessor = _read_json(directory / _PREPROCESSOR)
    if not preprocessor and isinstance(inner := processor.get("image_processor"), Mapping):
        preprocessor = dict(inner)
    return ProcessorFiles(
        hf_config=hf_config,
        preprocessor_config=preprocessor,
        processor_config=processor,
        token_id=tokenizer.token_to_id,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


def _read_json(file: Path) -> dict[str, Any]:
    """An object of JSON; empty if there is no such file."""
    try:
        if not file.is_file():
            return {}
        with file.open("rb") as opened:
            value = json.loads(opened.read(_MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds no object.")
    return value
