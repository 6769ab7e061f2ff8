"""What families have in common between a decoded image and their encoder's inputs.

Pixels stay bytes on their way to the model. What a processor would make of a channel's value is a
table of 256 numbers, sent along: a quarter of the bytes, and the same numbers exactly.

    pixels           uint8 [images, height, width, 3]
    channel_values   float32 [3, 256]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import ConfigError, InvalidRequestError, shown
from tokenmill.features.multimodal.processing import ProcessedImage

if TYPE_CHECKING:
    from PIL.Image import Image

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
MAX_ASPECT_RATIO = 200
"""Of edges. Models see nothing in narrower images, and enlarging them would take much memory."""

_NUM_CHANNELS = 3
_NUM_LEVELS = 256


def channel_values(
    config: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]
) -> np.ndarray:
    """What each value of a channel becomes, float32 [3, 256]: rescaled, then normalised.

    `mean` and `std` are those of a config that does not say. Raises `ConfigError` that names the
    key at fault.
    """
    levels = np.arange(_NUM_LEVELS, dtype=np.float32)
    if config.get("do_rescale", True):
        factor = _number(config.get("rescale_factor", 1 / 255), "rescale_factor")
        levels = (levels.astype(np.float64) * factor).astype(np.float32)
    values = np.tile(levels, (_NUM_CHANNELS, 1))
    if config.get("do_normalize", True):
        values -= _by_channel(config.get("image_mean"), mean, "image_mean")
        divisor = _by_channel(config.get("image_std"), std, "image_std")
        if not divisor.all():
            raise ConfigError("preprocessor_config.json: image_std must not be 0.")
        values /= divisor
    return values


def refuse_narrow(width: int, height: int) -> None:
    """Raise `InvalidRequestError` for an image whose edges are too unlike."""
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidRequestError(
            f"An image has {width} x {height} pixels; its longer edge must be at most"
            f" {MAX_ASPECT_RATIO} times as long as the shorter one. Crop it.",
            parameter="image",
        )


def edge_size(value: Any, *keys: str) -> int | None:
    """A size in pixels: `value` itself, or what it has under the first of `keys` that it has."""
    if isinstance(value, Mapping):
        value = next((value[key] for key in keys if value.get(key) is not None), None)
    if value is None or isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return None
    return value


def resampling(config: Mapping[str, Any], default: int) -> int:
    """The filter for resizing, as PIL counts them. Raises `ConfigError` for one it does not know.

    Counted are: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic, 4 box, 5 Hamming.
    """
    value = config.get("resample", default)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 5:
        raise ConfigError(
            f"preprocessor_config.json: resample is {shown(value)}, but must be an integer from 0"
            f" to 5."
        )
    return value


@dataclass(slots=True)
class Placeholders:
    """The run of tokens for an image, while it grows."""

    image_token_id: int
    token_ids: list[int] = field(default_factory=list)
    embed_spans: list[tuple[int, int]] = field(default_factory=list)

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Tokens that keep their own embeddings."""
        self.token_ids.extend(token_ids)

    def add_embeds(self, count: int) -> None:
        """Tokens that are given the encoder's."""
        self.embed_spans.append((len(self.token_ids), count))
        self.token_ids.extend([self.image_token_id] * count)

    def filled_by(self, images: Sequence[Image], values: np.ndarray) -> ProcessedImage:
        """With what the encoder takes for them: images of mode RGB and of one size, and what each
        value of a channel becomes (`channel_values`).
        """
        pixels = np.stack([np.asarray(image) for image in images])
        inputs = {"pixels": pixels, "channel_values": values}
        return ProcessedImage(inputs, self.token_ids, self.embed_spans)


def _by_channel(value: Any, default: Sequence[float], key: str) -> np.ndarray:
    """float32 [3, 1]"""
    value = default if value is None else value
    values = list(value) if isinstance(value, list | tuple) else [value] * _NUM_CHANNELS
    if len(values) != _NUM_CHANNELS:
        raise ConfigError(
            f"preprocessor_config.json: {key} is {shown(value)}, but must be a number or a list of"
            f" {_NUM_CHANNELS}."
        )
    return np.array([[_number(each, key)] for each in values], dtype=np.float32)


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"preprocessor_config.json: {key} is {shown(value)}, but is no number.")
    return float(value)
