r"""Gemma 3: each image is squeezed into the square that its tower sees, and becomes as many tokens
as any other.

    \n\n<start_of_image>EEEE...<end_of_image>\n\n

The line breaks belong to the text: with those that stand beside them they may be one token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenmill.config.parameters import positive_int
from tokenmill.errors import ConfigError, shown
from tokenmill.features.multimodal.processing import (
    ProcessedImage,
    ProcessorFiles,
    refuse_unknown_options,
)
from tokenmill.features.multimodal.processors.pixels import (
    HALF,
    Placeholders,
    channel_values,
    edge_size,
    refuse_narrow,
    resampling,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_BILINEAR = 2
_BEGIN, _END = "<start_of_image>", "<end_of_image>"


class Gemma3ImageProcessor:
    """One square image, without options."""

    mark_token = _BEGIN
    mark_text = _BEGIN
    text_around_mark = ("\n\n", "\n\n")

    def __init__(self, files: ProcessorFiles) -> None:
        """Raises `ConfigError` for a vocabulary without the ends of images, for images of another
        size than the tower's, and where images are to be cut into several.
        """
        vision, config = files.hf_config["vision_config"], files.preprocessor_config
        self.mark_token_id, self._end = (_token_id(files, token) for token in (_BEGIN, _END))
        self._image_token_id = positive_int(files.hf_config, "image_token_id", 262_144)
        self._num_tokens = positive_int(files.hf_config, "mm_tokens_per_image", 256)
        side = positive_int(vision, "image_size")
        size = config.get("size", side)
        self._size = side, side
        made = edge_size(size, "width"), edge_size(size, "height")
        if made != self._size or config.get("do_resize") is False:
            raise ConfigError(
                f"preprocessor_config.json makes images of size {shown(size)}, but the model's"
                f" tower takes {side} x {side} pixels."
            )
        if config.get("do_pan_and_scan"):
            raise ConfigError(
                "preprocessor_config.json: do_pan_and_scan is on; images are not cut into several"
                " here, so leave it out."
            )
        self._values = channel_values(config, HALF, HALF)
        self._resample = resampling(config, _BILINEAR)

    def num_tokens(self, width: int, height: int, options: Mapping[str, Any]) -> int:
        refuse_unknown_options(options, ())
        refuse_narrow(width, height)
        return self._num_tokens + 2

    def process(self, image: Image, options: Mapping[str, Any]) -> ProcessedImage:
        self.num_tokens(*image.size, options)
        placeholders = Placeholders(self._image_token_id)
        placeholders.add_tokens([self.mark_token_id])
        placeholders.add_embeds(self._num_tokens)
        placeholders.add_tokens([self._end])
        return placeholders.filled_by([image.resize(self._size, self._resample)], self._values)


def _token_id(files: ProcessorFiles, token: str) -> int:
    token_id = files.token_id(token)
    if token_id is None:
        raise ConfigError(
            f"tokenizer.json: there is no token {token!r}, which this model has around images."
        )
    return token_id
