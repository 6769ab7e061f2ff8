"""Idefics3 and SmolVLM: an image in tiles, each a square of embeddings, fewer than its patches.

tile -> tower -> squares of scale_factor ** 2 neighbours side by side -> linear
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tokenmill.config.parameters import positive_int
from tokenmill.errors import ConfigError
from tokenmill.models.vision.blocks import TowerParts
from tokenmill.models.vision.clip import VisionTransformer
from tokenmill.models.vision.pixels import pixel_values
from tokenmill.models.vision_language import VisionLanguageModel


class Idefics3Connector(nn.Module):
    """Joins neighbouring patches and projects them to what the decoder reads."""

    def __init__(self, hf_config: Mapping[str, Any], parts: TowerParts, num_values: int) -> None:
        """`num_values` are those of a patch."""
        super().__init__()
        self.scale = positive_int(hf_config, "scale_factor", 2)
        hidden_size = positive_int(hf_config, "hidden_size")
        projection = parts.linear(num_values * self.scale**2, hidden_size, bias=False)
        self.modality_projection = nn.ModuleDict({"proj": projection})

    def forward(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """Patches [rows * columns, num_values], row by row, to [n, hidden_size]."""
        grid = x.reshape(-1, self.scale, columns // self.scale, self.scale, x.shape[-1])
        joined = grid.permute(0, 2, 1, 3, 4).reshape(-1, self.scale**2 * x.shape[-1])
        return self.modality_projection["proj"](joined)  # type: ignore[no-any-return]


class Idefics3ForConditionalGeneration(VisionLanguageModel):
    """An Idefics3 or a SmolVLM."""

    def add_tower(self, hf_config: Mapping[str, Any], parts: TowerParts) -> None:
        self.vision_model = VisionTransformer(hf_config["vision_config"], parts)
        config = self.vision_model.config
        self.connector = Idefics3Connector(hf_config, parts, config.hidden_size)
        if config.side % self.connector.scale:
            raise ConfigError(
                f"config.json: image_size={config.image_size} makes {config.side} patches of"
                f" {config.patch_size} pixels an edge, not a multiple of"
                f" scale_factor={self.connector.scale}."
            )

    def embed_image(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of tiles of one size, in their order."""
        tiles = pixel_values(inputs)
        columns = tiles.shape[-1] // self.vision_model.config.patch_size
        # Memory holds the activations of one tile.
        embedded = [self.connector(self.vision_model(tile), columns) for tile in tiles]
        return torch.cat(embedded)

    def unused_in_tower(self) -> tuple[str, ...]:
        return self.vision_model.unused_prefixes("vision_model")
