r"""Idefics3 and SmolVLM: an image in tiles, row by row, and then the whole image in one.

An image is scaled to a longest edge, up if need be, then to multiples of a tile; both steps round
to pixels, as in the training of these models.

    <fake><row_1_col_1>EEE<fake><row_1_col_2>EEE\n           one tile a pair of marks
    <fake><row_2_col_1>EEE<fake><row_2_col_2>EEE\n\n
    <fake><global-img>EEE<fake>                             the whole, alone if it is one tile

E takes an embedding; everything else is a token like any.
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
    HALF,
    Placeholders,
    channel_values,
    edge_size,
    refuse_narrow,
    resampling,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_LANCZOS = 1
_LARGEST_EDGE = 4096
"""Whatever is asked for."""
_FAKE, _WHOLE = "<fake_token_around_image>", "<global-img>"
_OPTIONS = ("do_image_splitting", "size")


class Idefics3ImageProcessor:
    """Takes `do_image_splitting` (false: the whole image alone, in one tile) and `size`, such as
    {"longest_edge": 1024}, from a request.
    """

    def __init__(self, files: ProcessorFiles) -> None:
        """Raises `ConfigError` for tiles that the tower cannot take, or a vocabulary without the
        marks.
        """
        config, vision = files.preprocessor_config, files.hf_config["vision_config"]
        self.mark_token = "<image>"
        self.mark_token_id = positive_int(files.hf_config, "image_token_id", 128257)
        self.mark_text = self.mark_token
        self._splits = bool(config.get("do_image_splitting", True))
        self._resizes = bool(config.get("do_resize", True))
        image_size = positive_int(vision, "image_size")
        given = config.get("max_image_size") or {"longest_edge": image_size}
        self._tile = edge_size(given, "longest_edge") or 0
        self._longest = edge_size(config.get("size"), "longest_edge") or 4 * self._tile
        self._tile_tokens = _tokens_of_a_tile(self._tile, files.hf_config)
        self._values = channel_values(config, HALF, HALF)
        self._resample = resampling(config, _LANCZOS)
        self._files = files
        self._fake = self._ids(_FAKE)
        self._whole = self._ids(_WHOLE)
        self._row_end, self._last_row_end = files.encode("\n"), files.encode("\n\n")

    def num_tokens(self, width: int, height: int, options: Mapping[str, Any]) -> int:
        return len(self._placeholders(*self._grid(width, height, options)).token_ids)

    def process(self, image: Image, options: Mapping[str, Any]) -> ProcessedImage:
        columns, rows = self._grid(*image.size, options)
        placeholders = self._placeholders(columns, rows)
        tiles = self._tiles(image, columns, rows, options)
        return placeholders.filled_by(tiles, self._values)

    def _grid(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """(columns, rows) of tiles beside the whole; (0, 0) for the whole alone."""
        refuse_unknown_options(options, _OPTIONS)
        refuse_narrow(width, height)
        if not self._option(options, "do_image_splitting", bool, self._splits):
            return 0, 0
        size = self._scaled(width, height, options)
        columns, rows = (math.ceil(edge / self._tile) for edge in self._in_tiles(*size))
        return (0, 0) if columns == rows == 1 else (columns, rows)

    def _scaled(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """Width and height after the first step."""
        if not self._resizes:
            return width, height
        longest = self._longest
        size = self._option(options, "size", Mapping, None)
        if size is not None:
            asked = edge_size(size, "longest_edge")
            if asked is None or asked > _LARGEST_EDGE or set(size) != {"longest_edge"}:
                raise InvalidRequestError(
                    f"mm_processor_kwargs: size is {shown(size)}, but must be"
                    f" {{'longest_edge': pixels}}, at most {_LARGEST_EDGE}.",
                    parameter="mm_processor_kwargs",
                )
            longest = asked
        ratio = width / height
        if width >= height:
            width, height = longest, _even(int(longest / ratio))
        else:
            width, height = _even(int(longest * ratio)), longest
        width, height = max(width, 1), max(height, 1)
        return _below(width, height, _LARGEST_EDGE)

    def _in_tiles(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after the second step, multiples of a tile."""
        ratio = width / height
        if width >= height:
            width = self._up(width)
            return width, self._up(int(width / ratio))
        height = self._up(height)
        return self._up(int(height * ratio)), height

    def _up(self, edge: int) -> int:
        return math.ceil(edge / self._tile) * self._tile

    def _tiles(
        self, image: Image, columns: int, rows: int, options: Mapping[str, Any]
    ) -> list[Image]:
        tile = self._tile
        scaled = self._scaled(*image.size, options)
        if scaled != image.size:
            image = image.resize(scaled, self._resample)
        if not columns:
            return [self._resized(image, (tile, tile))]
        image = self._resized(image, (columns * tile, rows * tile))
        tiles = [
            image.crop((x * tile, y * tile, (x + 1) * tile, (y + 1) * tile))
            for y in range(rows)
            for x in range(columns)
        ]
        return [*tiles, self._resized(image, (tile, tile))]

    def _resized(self, image: Image, size: tuple[int, int]) -> Image:
        return image if image.size == size else image.resize(size, self._resample)

    def _placeholders(self, columns: int, rows: int) -> Placeholders:
        placeholders = Placeholders(self.mark_token_id)
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                self._add_tile(placeholders, self._ids(f"<row_{row}_col_{column}>"))
            placeholders.add_tokens(self._row_end if row < rows else self._last_row_end)
        self._add_tile(placeholders, self._whole)
        placeholders.add_tokens(self._fake)
        return placeholders

    def _add_tile(self, placeholders: Placeholders, mark: list[int]) -> None:
        placeholders.add_tokens(self._fake)
        placeholders.add_tokens(mark)
        placeholders.add_embeds(self._tile_tokens)

    def _ids(self, mark: str) -> list[int]:
        """A token of the vocabulary, or, as some models have it, several that spell it."""
        token_id = self._files.token_id(mark)
        if token_id is not None:
            return [token_id]
        if mark == _FAKE:
            raise ConfigError(
                f"tokenizer.json: there is no token {mark!r}, which this model has around images."
            )
        return self._files.encode(mark)

    @staticmethod
    def _option(options: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
        value = options.get(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            what = "true or false" if kind is bool else "an object"
            raise InvalidRequestError(
                f"mm_processor_kwargs: {name} is {shown(value)}, but must be {what}.",
                parameter="mm_processor_kwargs",
            )
        return value


def _tokens_of_a_tile(tile: int, hf_config: Mapping[str, Any]) -> int:
    """Embeddings made of a tile. Raises `ConfigError` for one that the model cannot take."""
    patch_size = positive_int(hf_config["vision_config"], "patch_size")
    scale = positive_int(hf_config, "scale_factor", 2)
    side = tile // patch_size
    if not side or side % scale:
        raise ConfigError(
            f"preprocessor_config.json: max_image_size={tile} makes {side} patches of {patch_size}"
            f" pixels an edge, not a multiple of scale_factor={scale}."
        )
    return int((side // scale) ** 2)


def _even(edge: int) -> int:
    return edge + edge % 2


def _below(width: int, height: int, longest: int) -> tuple[int, int]:
    """Scaled down to a longest edge, if need be."""
    ratio = width / height
    if width >= height and width > longest:
        return longest, max(int(longest / ratio), 1)
    if height > width and height > longest:
        return max(int(longest * ratio), 1), longest
    return width, height
