"""LLaVA-NeXT and LLaVA-OneVision: a LLaVA that sees an image whole and in tiles.

whole tile -> embeddings of its patches, row by row
tiles      -> those of all tiles in their places -> ( without borders ) -> ( scaled down )
           -> row by row, a learned embedding at each row's end
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from tokenmill.config.parameters import positive_int
from tokenmill.errors import ConfigError
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot
from tokenmill.models.llava import LlavaForConditionalGeneration, Tower
from tokenmill.models.vision.blocks import TowerParts
from tokenmill.models.vision.clip import VisionTransformer
from tokenmill.models.vision.pixels import pixel_values


class ImageNewline(nn.Module):
    """What stands at the end of a row."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.values = empty_parameter(hidden_size, dtype=dtype)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield parameter_slot(prefix, self.values)

    def behind(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, columns, hidden_size] with one more column."""
        return torch.cat([rows, self.values.expand(len(rows), 1, -1)], dim=1)


class LlavaNextForConditionalGeneration(LlavaForConditionalGeneration):
    """A LLaVA-NeXT (1.6), or a LLaVA-OneVision."""

    towers: ClassVar[Mapping[str, type[Tower]]] = {
        "clip_vision_model": VisionTransformer,
        "siglip_vision_model": VisionTransformer,
    }

    def add_tower(self, hf_config: Mapping[str, Any], parts: TowerParts) -> None:
        super().add_tower(hf_config, parts)
        assert isinstance(self.vision_tower, VisionTransformer)
        config = self.vision_tower.config
        if config.num_positions - self.drops_first != config.side**2:
            raise ConfigError(
                "config.json: vision_feature_select_strategy must leave a state for each patch of"
                " a tile: 'default' for CLIP, which has a class token, and 'full' for SigLIP."
            )
        self.side = config.side
        self.image_newline = ImageNewline(positive_int(hf_config, "hidden_size"), parts.dtype)

    def embed_image(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of the whole tile and of tiles, row by row; `layout` is int64 [6]: their rows and
        columns, the rows and columns of patches to leave out on either side, and to scale to.
        """
        whole, *tiles = (self.embed_tile(tile) for tile in pixel_values(inputs))
        rows, columns, cut_rows, cut_columns, *scaled = inputs["layout"].tolist()
        side = self.side
        grid = torch.stack(tiles).view(rows, columns, side, side, -1).transpose(1, 2)
        grid = grid.reshape(rows * side, columns * side, -1)
        grid = grid[cut_rows : rows * side - cut_rows, cut_columns : columns * side - cut_columns]
        lines = self.image_newline.behind(_scaled(grid, scaled))
        return torch.cat([whole, lines.flatten(0, 1)])


def _scaled(grid: torch.Tensor, size: list[int]) -> torch.Tensor:
    """Embeddings [rows, columns, hidden_size] for another number of rows and columns."""
    if list(grid.shape[:2]) == size:
        return grid
    by_value = grid.permute(2, 0, 1)[None].float()
    found = functional.interpolate(by_value, size, mode="bilinear")
    return found[0].permute(1, 2, 0).to(grid.dtype)
