"""Pixtral and Mistral Small 3.1: an image keeps its shape, at most as large as the model's bound,
with edges that are multiples of a square of patches. Each square is a token, and each row ends in
one.

    EEEE<break>EEEE<break>EEEE<end>
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
_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


class PixtralImageProcessor:
    """Takes `size`, such as {"longest_edge": 512}, from a request, up to the model's own bound."""

    def __init__(self, files: ProcessorFiles) -> None:
        """Raises `ConfigError` for a vocabulary without the ends of rows."""
        config, vision = files.preprocessor_config, files.hf_config["vision_config"]
        self.mark_token = str(files.processor_config.get("image_token", "[IMG]"))
        self.mark_token_id = positive_int(files.hf_config, "image_token_id", 10)
        self.mark_text = self.mark_token
        # Of LLaVA with this tower, a patch is a token.
        merges = str(files.hf_config["architectures"][0]).startswith("Mistral3")
        merge = positive_int(files.hf_config, "spatial_merge_size", 2) if merges else 1
        self._square = positive_int(vision, "patch_size") * merge
        size = config.get("size")
        self._longest = edge_size(size, "longest_edge", "height") or positive_int(
            vision, "image_size"
        )
        self._values = channel_values(config, CLIP_MEAN, CLIP_STD)
        self._resample = resampling(config, _BICUBIC)
        self._break, self._end = (_token_id(files, token) for token in (_BREAK, _END))

    def num_tokens(self, width: int, height: int, options: Mapping[str, Any]) -> int:
        columns, rows = self._grid(width, height, options)
        return rows * (columns + 1)

    def process(self, image: Image, options: Mapping[str, Any]) -> ProcessedImage:
        columns, rows = self._grid(*image.size, options)
        placeholders = Placeholders(self.mark_token_id)
        for row in range(1, rows + 1):
            placeholders.add_embeds(columns)
            placeholders.add_tokens([self._break if row < rows else self._end])
        size = (columns * self._square, rows * self._square)
        return placeholders.filled_by([image.resize(size, self._resample)], self._values)

    def _grid(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """(columns, rows) of squares."""
        refuse_unknown_options(options, ("size",))
        refuse_narrow(width, height)
        shrink = max(width, height) / self._bound(options)
        if shrink > 1:
            width, height = math.floor(width / shrink), math.floor(height / shrink)
        return max(math.ceil(width / self._square), 1), max(math.ceil(height / self._square), 1)

    def _bound(self, options: Mapping[str, Any]) -> int:
        size = options.get("size")
        if size is None:
            return self._longest
        asked = edge_size(size, "longest_edge") if isinstance(size, Mapping) else None
        if asked is None or asked > self._longest or set(size) != {"longest_edge"}:
            raise InvalidRequestError(
                f"mm_processor_kwargs: size is {shown(size)}, but must be"
                f" {{'longest_edge': pixels}}, at most {self._longest}.",
                parameter="mm_processor_kwargs",
            )
        return asked


def _token_id(files: ProcessorFiles, token: str) -> int:
    token_id = files.token_id(token)
    if token_id is None:
        raise ConfigError(
            f"tokenizer.json: there is no token {token!r}, which ends a row of this model's images."
        )
    return token_id
