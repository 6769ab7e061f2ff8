"""Qwen2-VL and Qwen2.5-VL: an image keeps its shape, with edges that are multiples of a square of
patches, and within bounds on its pixels. Each square is a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenmill.config.parameters import positive_int
from tokenmill.errors import ConfigError, InvalidRequestError, shown
from tokenmill.features.multimodal.processing import (
    ProcessedImage,
    ProcessorFiles,
    refuse_unknown_options,
)
from tokenmill.features.multimodal.processors.pixels import (
    CLIP_MEAN,
    CLIP_STD,
    Placeholders,
    channel_values,
    edge_size,
    refuse_narrow,
    resampling,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_BICUBIC = 3
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280
_OPTIONS = ("min_pixels", "max_pixels", "size")


class Qwen2VLImageProcessor:
    """Takes `min_pixels` and `max_pixels` from a request, up to the model's own bound, or both as
    `size`: {"shortest_edge": ..., "longest_edge": ...}.
    """

    def __init__(self, files: ProcessorFiles) -> None:
        """Raises `ConfigError` for patches that are not those of the tower."""
        config, vision = files.preprocessor_config, files.hf_config["vision_config"]
        self.mark_token = "<|image_pad|>"
        self.mark_token_id = positive_int(files.hf_config, "image_token_id", 151655)
        self.mark_text = f"<|vision_start|>{self.mark_token}<|vision_end|>"
        patch = _same(config, "patch_size", vision, "patch_size")
        self._square = patch * _same(config, "merge_size", vision, "spatial_merge_size")
        size = config.get("size") or {}
        self._min_pixels = (
            edge_size(config.get("min_pixels"))
            or edge_size(size, "shortest_edge", "min_pixels")
            or _MIN_PIXELS
        )
        self._max_pixels = (
            edge_size(config.get("max_pixels"))
            or edge_size(size, "longest_edge", "max_pixels")
            or _MAX_PIXELS
        )
        self._values = channel_values(config, CLIP_MEAN, CLIP_STD)
        self._resample = resampling(config, _BICUBIC)

    def num_tokens(self, width: int, height: int, options: Mapping[str, Any]) -> int:
        width, height = self._size(width, height, options)
        return width // self._square * (height // self._square)

    def process(self, image: Image, options: Mapping[str, Any]) -> ProcessedImage:
        size = self._size(*image.size, options)
        placeholders = Placeholders(self.mark_token_id)
        placeholders.add_embeds(size[0] // self._square * (size[1] // self._square))
        return placeholders.filled_by([image.resize(size, self._resample)], self._values)

    def _size(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """Width and height that an image is resized to."""
        refuse_unknown_options(options, _OPTIONS)
        refuse_narrow(width, height)
        least, most = self._bounds(options)
        square, pixels = self._square, width * height
        # Halves are rounded to even, as in the training of these models.
        sizes = [round(edge / square) * square for edge in (width, height)]
        if sizes[0] * sizes[1] > most:
            shrink = math.sqrt(pixels / most)
            sizes = [
                max(square, math.floor(edge / shrink / square) * square) for edge in (width, height)
            ]
        elif sizes[0] * sizes[1] < least:
            grow = math.sqrt(least / pixels)
            sizes = [math.ceil(edge * grow / square) * square for edge in (width, height)]
        return sizes[0], sizes[1]

    def _bounds(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Least and most pixels, as a request and the files say."""
        size = options.get("size")
        if size is not None and not isinstance(size, Mapping):
            raise _refused("size", size, "an object with shortest_edge and longest_edge")
        given = {**_by_option(size or {}), **options}
        bounds = []
        for name, own in (("min_pixels", self._min_pixels), ("max_pixels", self._max_pixels)):
            value = given.get(name)
            value = own if value is None else value
            pixels = edge_size(value)
            if pixels is None or pixels > self._max_pixels:
                raise _refused(name, value, f"pixels from 1 to {self._max_pixels}")
            bounds.append(pixels)
        least, most = bounds
        if least > most:
            raise _refused("min_pixels", least, f"at most max_pixels, {most}")
        return least, most


def _by_option(size: Mapping[str, Any]) -> dict[str, Any]:
    """What `size` says, under the names of options."""
    names = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    for key in size:
        if key not in names:
            raise _refused("size", dict(size), "an object with shortest_edge and longest_edge")
    return {names[key]: value for key, value in size.items()}


def _refused(name: str, value: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"mm_processor_kwargs: {name} is {shown(value)}, but must be {wanted}.",
        parameter="mm_processor_kwargs",
    )


def _same(config: Mapping[str, Any], key: str, vision: Mapping[str, Any], tower_key: str) -> int:
    """What both files say. Raises `ConfigError` where they differ."""
    of_tower = positive_int(vision, tower_key)
    given = positive_int(config, key, of_tower)
    if given != of_tower:
        raise ConfigError(
            f"preprocessor_config.json: {key} is {given}, but the model's tower has"
            f" {tower_key}={of_tower}."
        )
    return given
