"""LLaVA: each image becomes the square that its tower sees, and as many tokens as that has patches.

CLIP      the shorter edge to the tower's size, then the middle of it
SigLIP    resized to the tower's size, whatever its shape
Pixtral   see pixtral.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenmill.config.parameters import positive_int
from tokenmill.errors import ConfigError, shown
from tokenmill.features.multimodal.processing import (
    ImageProcessor,
    ProcessedImage,
    ProcessorFiles,
    refuse_unknown_options,
)
from tokenmill.features.multimodal.processors.pixels import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    Placeholders,
    channel_values,
    edge_size,
    refuse_narrow,
    resampling,
)
from tokenmill.features.multimodal.processors.pixtral import PixtralImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

_BICUBIC = 3


class LlavaImageProcessor:
    """One square image, without options."""

    def __init__(self, files: ProcessorFiles) -> None:
        """Raises `ConfigError` for files that make images of another size than the tower's."""
        vision = files.hf_config["vision_config"]
        config = files.preprocessor_config
        is_clip = vision["model_type"] == "clip_vision_model"
        self.mark_token = str(files.processor_config.get("image_token", "<image>"))
        self.mark_token_id = positive_int(files.hf_config, "image_token_id", 32000)
        self.mark_text = f"{self.mark_token}\n"
        self._side = positive_int(vision, "image_size")
        self._num_tokens = (self._side // positive_int(vision, "patch_size")) ** 2
        self._num_tokens += is_clip - _drops_first(files.hf_config)
        mean, std = (CLIP_MEAN, CLIP_STD) if is_clip else (HALF, HALF)
        self._values = channel_values(config, mean, std)
        self._resample = resampling(config, _BICUBIC)
        self._background = _background(config, is_clip)
        self._shorter, self._size = _sizes(config, self._side, is_clip)
        self._refuse_other_sizes(config, is_clip)

    def _refuse_other_sizes(self, config: Mapping[str, Any], is_clip: bool) -> None:
        made: tuple[int | None, int | None] = self._size
        if self._shorter is not None and self._background is not None:
            made = (self._shorter, self._shorter)
        if config.get("do_center_crop", is_clip):
            crop = config.get("crop_size", self._side)
            made = (edge_size(crop, "width"), edge_size(crop, "height"))
        if made != (self._side, self._side) or not config.get("do_resize", True):
            raise ConfigError(
                f"preprocessor_config.json makes images of {made[0]} x {made[1]} pixels (size:"
                f" {shown(config.get('size'))}, crop_size: {shown(config.get('crop_size'))}), but"
                f" the model's tower takes {self._side} x {self._side}."
            )

    def num_tokens(self, width: int, height: int, options: Mapping[str, Any]) -> int:
        refuse_unknown_options(options, ())
        refuse_narrow(width, height)
        return self._num_tokens

    def process(self, image: Image, options: Mapping[str, Any]) -> ProcessedImage:
        self.num_tokens(*image.size, options)
        placeholders = Placeholders(self.mark_token_id)
        placeholders.add_embeds(self._num_tokens)
        return placeholders.filled_by([self._square(image)], self._values)

    def _square(self, image: Image) -> Image:
        if self._background is not None:
            image = _padded(image, self._background)
        width, height = image.size
        size = self._size
        if self._shorter is not None and width <= height:
            size = (self._shorter, self._shorter * height // width)
        elif self._shorter is not None:
            size = (self._shorter * width // height, self._shorter)
        return _middle(image.resize(size, self._resample), self._side)


def _sizes(
    config: Mapping[str, Any], side: int, is_clip: bool
) -> tuple[int | None, tuple[int, int]]:
    """The size of the shorter edge, if that is what images are resized to; else width and height.

    Raises `ConfigError` for neither.
    """
    size = config.get("size", side)
    keeps_shape = "shortest_edge" in size if isinstance(size, Mapping) else is_clip
    if keeps_shape:
        shorter = edge_size(size, "shortest_edge")
        if shorter is not None:
            return shorter, (0, 0)
    width, height = edge_size(size, "width"), edge_size(size, "height")
    if width is None or height is None:
        raise ConfigError(
            f"preprocessor_config.json: size is {shown(size)}, but must be pixels, or an object"
            f" with shortest_edge, or with height and width."
        )
    return None, (width, height)


def llava_image_processor(files: ProcessorFiles) -> ImageProcessor:
    """That of the tower. Raises `ConfigError` as the processors do."""
    if files.hf_config["vision_config"]["model_type"] == "pixtral":
        return PixtralImageProcessor(files)
    return LlavaImageProcessor(files)


def _drops_first(hf_config: Mapping[str, Any]) -> bool:
    return (hf_config.get("vision_feature_select_strategy") or "default") == "default"


def _background(config: Mapping[str, Any], is_clip: bool) -> tuple[int, ...] | None:
    """The colour around images that are made square; None where they are not."""
    if not config.get("do_pad") or "Llava" not in str(config.get("image_processor_type")):
        return None
    mean = config.get("image_mean") or (CLIP_MEAN if is_clip else HALF)
    return tuple(int(value * 255) for value in mean)


def _padded(image: Image, background: tuple[int, ...]) -> Image:
    """The image in the middle of a square."""
    from PIL.Image import new

    side = max(image.size)
    square = new("RGB", (side, side), background)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _middle(image: Image, side: int) -> Image:
    """The square of `side` pixels in the middle; black where the image is smaller."""
    left, top = (_begin(edge, side) for edge in image.size)
    return image.crop((left, top, left + side, top + side))


def _begin(edge: int, side: int) -> int:
    """Where the middle begins; an odd pixel too few goes in front."""
    return (edge - side) // 2
