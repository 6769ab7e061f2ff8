"""InternVL 3: an image squeezed into the grid of tiles whose shape is nearest to its own, row by
row, and behind these the whole image in one tile.

    <img>EEEE EEEE ... EEEE</img>        E: an embedding for each square of patches of a tile
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenmill.config.parameters import number, positive_int
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
_MARK, _BEGIN, _END = "<IMG_CONTEXT>", "<img>", "</img>"
_OPTIONS = ("crop_to_patches", "min_patches", "max_patches")


class InternVLImageProcessor:
    """Takes `crop_to_patches` (false: the whole image alone), `min_patches` and `max_patches`, up
    to the model's own bound on tiles, from a request.
    """

    mark_token = _MARK
    mark_text = f"{_MARK}\n"

    def __init__(self, files: ProcessorFiles) -> None:
        """Raises `ConfigError` for tiles that the tower cannot take, or a vocabulary without the
        ends of images.
        """
        config, vision = files.preprocessor_config, files.hf_config["vision_config"]
        self.mark_token_id = positive_int(files.hf_config, "image_token_id", 151_667)
        self._begin, self._end = (_token_id(files, token) for token in (_BEGIN, _END))
        self._tile = positive_int(vision, "image_size")
        size = config.get("size", self._tile)
        made = edge_size(size, "height"), edge_size(size, "width")
        if made != (self._tile, self._tile) or config.get("do_resize") is False:
            raise ConfigError(
                f"preprocessor_config.json makes tiles of size {shown(size)}, but the model's tower"
                f" takes {self._tile} x {self._tile} pixels."
            )
        side = self._tile // positive_int(vision, "patch_size")
        self._tile_tokens = int(side * number(files.hf_config, "downsample_ratio", 0.5)) ** 2
        self._least = positive_int(config, "min_patches", 1)
        self._most = positive_int(config, "max_patches", 12)
        self._values = channel_values(config, CLIP_MEAN, CLIP_STD)
        self._resample = resampling(config, _BICUBIC)

    def num_tokens(self, width: int, height: int, options: Mapping[str, Any]) -> int:
        columns, rows = self._grid(width, height, options)
        return self._num_tiles(columns, rows) * self._tile_tokens + 2

    def process(self, image: Image, options: Mapping[str, Any]) -> ProcessedImage:
        columns, rows = self._grid(*image.size, options)
        placeholders = Placeholders(self.mark_token_id)
        placeholders.add_tokens([self._begin])
        placeholders.add_embeds(self._num_tiles(columns, rows) * self._tile_tokens)
        placeholders.add_tokens([self._end])
        return placeholders.filled_by(self._tiles(image, columns, rows), self._values)

    @staticmethod
    def _num_tiles(columns: int, rows: int) -> int:
        """With the one of the whole, unless that is all."""
        return columns * rows + (columns * rows > 1)

    def _tiles(self, image: Image, columns: int, rows: int) -> list[Image]:
        tile = self._tile
        grid = image.resize((columns * tile, rows * tile), self._resample)
        tiles = [
            grid.crop((x * tile, y * tile, (x + 1) * tile, (y + 1) * tile))
            for y in range(rows)
            for x in range(columns)
        ]
        if len(tiles) > 1:
            tiles.append(image.resize((tile, tile), self._resample))
        return tiles

    def _grid(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """(columns, rows) of tiles. Of grids whose shape is as near, larger ones are better while
        they have at most twice the pixels of the image.
        """
        refuse_unknown_options(options, _OPTIONS)
        refuse_narrow(width, height)
        least, most = self._bounds(options)
        best, least_difference = (1, 1), float("inf")
        for columns, rows in _grids(least, most):
            difference = abs(width / height - columns / rows)
            is_large = width * height > 0.5 * self._tile**2 * columns * rows
            if difference < least_difference or (difference == least_difference and is_large):
                best, least_difference = (columns, rows), difference
        return best

    def _bounds(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Least and most tiles, as a request and the files say."""
        crops = options.get("crop_to_patches")
        if crops is not None and not isinstance(crops, bool):
            raise _refused("crop_to_patches", crops, "true or false")
        most = self._number(options, "max_patches", self._most, self._most)
        least = self._number(options, "min_patches", min(self._least, most), most)
        return (1, 1) if crops is False or most == 1 else (least, most)

    @staticmethod
    def _number(options: Mapping[str, Any], name: str, default: int, most: int) -> int:
        value = options.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise _refused(name, value, f"from 1 to {most}")
        return value


def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """(columns, rows) with so many tiles, smaller ones first."""
    grids = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if columns * rows >= least
    ]
    return sorted(grids, key=lambda grid: grid[0] * grid[1])


def _refused(name: str, value: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"mm_processor_kwargs: {name} is {shown(value)}, but must be {wanted}.",
        parameter="mm_processor_kwargs",
    )


def _token_id(files: ProcessorFiles, token: str) -> int:
    token_id = files.token_id(token)
    if token_id is None:
        raise ConfigError(
            f"tokenizer.json: there is no token {token!r}, which this model has around images."
        )
    return token_id
