"""InternVL 3: an image in tiles, of each of which squares of patches become one embedding.

tile -> tower -> squares of neighbours side by side -> norm -> linear -> GELU -> linear
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenmill.config.parameters import number, positive_int
from tokenmill.errors import ConfigError
from tokenmill.models.llava import drops_first
from tokenmill.models.vision.blocks import TowerMLP, TowerParts, kept_layers
from tokenmill.models.vision.internvl import InternVLVisionModel
from tokenmill.models.vision.pixels import pixel_values
from tokenmill.models.vision_language import VisionLanguageModel

_EPS = 1e-5


class InternVLProjector(TowerMLP):
    """Joins neighbouring patches and projects them to what the decoder reads."""

    def __init__(self, hf_config: Mapping[str, Any], parts: TowerParts, side: int) -> None:
        """`side` are the patches of an edge. Raises `ConfigError` if squares do not fill it."""
        ratio = number(hf_config, "downsample_ratio", 0.5)
        self.merge_size = int(1 / ratio) if ratio > 0 else 0
        if not self.merge_size or side % self.merge_size:
            raise ConfigError(
                f"config.json: a tile has {side} patches an edge, which squares of"
                f" {self.merge_size} (1 / downsample_ratio) do not fill."
            )
        values = positive_int(hf_config["vision_config"], "hidden_size") * self.merge_size**2
        hidden_size = positive_int(hf_config, "hidden_size")
        super().__init__(
            parts,
            (values, hidden_size, hidden_size),
            {"projector_hidden_act": "gelu", **hf_config},
            names=("linear_1", "linear_2"),
            activation_key="projector_hidden_act",
        )
        self.layer_norm = parts.layer_norm(values, _EPS)

    def merge(self, states: torch.Tensor, side: int) -> torch.Tensor:
        """Patches [side * side, values], row by row, to [n, hidden_size]."""
        size, merge = states.shape[1], self.merge_size
        grid = states.view(-1, merge, side // merge, merge, size)
        joined = grid.permute(0, 2, 1, 3, 4).reshape(-1, size * merge**2)
        return self(self.layer_norm(joined)[0])  # type: ignore[no-any-return]


class InternVLForConditionalGeneration(VisionLanguageModel):
    """An InternVL 3 or 3.5, in the format of transformers."""

    def add_tower(self, hf_config: Mapping[str, Any], parts: TowerParts) -> None:
        vision = hf_config["vision_config"]
        layers = kept_layers(hf_config, positive_int(vision, "num_hidden_layers"), default=-1)
        if len(layers) != 1 or not drops_first(hf_config):
            raise ConfigError(
                f"config.json: vision_feature_layer={layers} must be one of the tower's layers, and"
                f" vision_feature_select_strategy 'default'."
            )
        self.vision_tower = InternVLVisionModel(vision, parts, kept_layer=layers[0])
        self.multi_modal_projector = InternVLProjector(
            hf_config, parts, self.vision_tower.embeddings.side
        )

    def embed_image(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of tiles of the tower's size, in their order."""
        return torch.cat([self._embed_tile(tile) for tile in pixel_values(inputs)])

    def _embed_tile(self, tile: torch.Tensor) -> torch.Tensor:
        states = self.vision_tower(tile)[1:]
        return self.multi_modal_projector.merge(states, self.vision_tower.embeddings.side)

    def unused_in_tower(self) -> tuple[str, ...]:
        return self.vision_tower.unused_prefixes("vision_tower")
