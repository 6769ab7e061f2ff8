"""LLaVA-NeXT and LLaVA-OneVision: the whole image squeezed into one tile, and then the image in
tiles, within the one of the model's resolutions that shows most of it.

    best resolution, 2 x 3 tiles           embeddings of patches
    +-----+-----+-----+                    whole tile, row by row
    |.....|.....|.....|  black             EEEEEEEEEE <newline>     rows of all tiles side by side;
    |     image       |                    EEEEEEEEEE <newline>     those of the black borders are
    |.....|.....|.....|  black             EEEEEEEEEE <newline>     left out

Each is a token, line ends included. OneVision scales the rows and columns behind the whole tile
down where they are too many. Each image is processed as if it was alone in its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

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
_SCALED_FROM = 1.1
"""How many times as many patches an edge must have for it."""

Size = tuple[int, int]
"""Height and width, as these models' files order them."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """What becomes of an image."""

    resolution: Size
    """Of its tiles together, in pixels."""
    cut: Size
    """Rows and columns of patches that are left out on either side."""
    rows_columns: Size
    """Rows and columns of what is left, scaled down."""


class AnyresImageProcessor:
    """Tiles of one size, without options."""

    def __init__(self, files: ProcessorFiles) -> None:
        """Raises `ConfigError` for tiles that the tower cannot take."""
        config, vision = files.preprocessor_config, files.hf_config["vision_config"]
        self.mark_token = str(files.processor_config.get("image_token", "<image>"))
        self.mark_token_id = positive_int(files.hf_config, "image_token_id")
        self.mark_text = f"{self.mark_token}\n"
        self._tile = positive_int(vision, "image_size")
        self._side = self._tile // positive_int(vision, "patch_size")
        self._refuse_other_tiles(config)
        self._resolutions = _resolutions(config, files.hf_config, self._tile)
        self._most = _most_tiles(files.hf_config)
        self._values = channel_values(config, CLIP_MEAN, CLIP_STD)
        self._resample = resampling(config, _BICUBIC)

    def _refuse_other_tiles(self, config: Mapping[str, Any]) -> None:
        size = config.get("size", self._tile)
        made = [
            edge_size(size, "height", "shortest_edge"),
            edge_size(size, "width", "shortest_edge"),
        ]
        if config.get("do_center_crop"):
            crop = config.get("crop_size", self._tile)
            made += [edge_size(crop, "height"), edge_size(crop, "width")]
        if set(made) != {self._tile} or config.get("do_resize") is False:
            raise ConfigError(
                f"preprocessor_config.json makes tiles of size {shown(size)}, cut to"
                f" {shown(config.get('crop_size'))}, but the model's tower takes"
                f" {self._tile} x {self._tile} pixels."
            )

    def num_tokens(self, width: int, height: int, options: Mapping[str, Any]) -> int:
        refuse_unknown_options(options, ())
        refuse_narrow(width, height)
        rows, columns = self._layout(width, height).rows_columns
        return self._side**2 + rows * (columns + 1)

    def process(self, image: Image, options: Mapping[str, Any]) -> ProcessedImage:
        placeholders = Placeholders(self.mark_token_id)
        placeholders.add_embeds(self.num_tokens(*image.size, options))
        layout = self._layout(*image.size)
        processed = placeholders.filled_by(self._tiles(image, layout.resolution), self._values)
        height, width = layout.resolution
        processed.inputs["layout"] = np.array(
            [height // self._tile, width // self._tile, *layout.cut, *layout.rows_columns], np.int64
        )
        return processed

    def _layout(self, width: int, height: int) -> _Layout:
        resolution = _best_resolution(width, height, self._resolutions)
        rows, columns = (edge // self._tile * self._side for edge in resolution)
        cut_rows = cut_columns = 0
        # Both roundings are those that the models were trained with.
        if width / height > columns / rows:
            cut_rows = (rows - int(round(height * (columns / width), 7))) // 2
        else:
            cut_columns = (columns - int(round(width * (rows / height), 7))) // 2
        kept = rows - 2 * cut_rows, columns - 2 * cut_columns
        return _Layout(resolution, (cut_rows, cut_columns), self._scaled(kept))

    def _scaled(self, kept: Size) -> Size:
        if self._most is None:
            return kept
        ratio = math.sqrt(kept[0] * kept[1] / (self._most * self._side**2))
        if ratio <= _SCALED_FROM:
            return kept
        return int(kept[0] // ratio), int(kept[1] // ratio)

    def _tiles(self, image: Image, resolution: Size) -> list[Image]:
        from PIL.Image import new

        height, width = resolution
        scale = min(width / image.width, height / image.height)
        if width / image.width < height / image.height:
            size = width, min(math.ceil(image.height * scale), height)
        else:
            size = min(math.ceil(image.width * scale), width), height
        padded = new("RGB", (width, height))
        padded.paste(
            image.resize(size, self._resample), ((width - size[0]) // 2, (height - size[1]) // 2)
        )
        tile = self._tile
        return [
            image.resize((tile, tile), self._resample),
            *(
                padded.crop((left, top, left + tile, top + tile))
                for top in range(0, height, tile)
                for left in range(0, width, tile)
            ),
        ]


def _best_resolution(width: int, height: int, resolutions: Sequence[Size]) -> Size:
    """The one that shows most pixels of an image; of several, the smallest."""
    best, most, least_waste = None, 0, 0
    for resolution in resolutions:
        scale = min(resolution[1] / width, resolution[0] / height)
        shown_pixels = min(int(width * scale) * int(height * scale), width * height)
        waste = resolution[0] * resolution[1] - shown_pixels
        if shown_pixels > most or (shown_pixels == most and waste < least_waste):
            best, most, least_waste = resolution, shown_pixels, waste
    if best is None:
        raise InvalidRequestError(
            f"An image has {width} x {height} pixels, too narrow for the tiles of this model. Crop"
            f" it.",
            parameter="image",
        )
    return best


def _resolutions(config: Mapping[str, Any], hf_config: Mapping[str, Any], tile: int) -> list[Size]:
    """Raises `ConfigError` for what are no sizes of whole tiles."""
    listed = config.get("image_grid_pinpoints") or hf_config["image_grid_pinpoints"]
    each_of = listed if isinstance(listed, list | tuple) else ()
    sizes = [tuple(map(edge_size, each)) for each in each_of if isinstance(each, list | tuple)]
    good = [(size[0], size[1]) for size in sizes if len(size) == 2 and size[0] and size[1]]
    if not good or len(good) != len(listed) or any(edge % tile for size in good for edge in size):
        raise ConfigError(
            f"config.json: image_grid_pinpoints={shown(listed)} must list heights and widths that"
            f" are multiples of the tower's {tile} pixels."
        )
    return good


def _most_tiles(hf_config: Mapping[str, Any]) -> int | None:
    """How many tiles' worth of patches there may be; None where nothing is scaled down."""
    given = hf_config.get("vision_aspect_ratio")
    if given is None:
        return None
    number = str(given).removeprefix("anyres_max_")
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(
            f"config.json: vision_aspect_ratio={shown(given)} is not supported; such as"
            f" 'anyres_max_9' are."
        )
    return int(number)
