"""Mistral Small 3.1 and 3.2: a Pixtral tower, squares of whose patches become one embedding.

image -> tower -> norm -> squares of neighbours -> linear -> linear -> GELU -> linear
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tokenmill.config.parameters import positive_int
from tokenmill.errors import ConfigError, shown
from tokenmill.models.config import norm_eps
from tokenmill.models.vision.blocks import TowerMLP, TowerParts, kept_layers
from tokenmill.models.vision.pixels import pixel_values
from tokenmill.models.vision.pixtral import PixtralVisionModel
from tokenmill.models.vision_language import VisionLanguageModel


class Mistral3Projector(TowerMLP):
    """Joins neighbouring patches and projects them to what the decoder reads."""

    def __init__(self, hf_config: Mapping[str, Any], parts: TowerParts, size: int) -> None:
        """`size` are the values of a patch."""
        out = positive_int(hf_config, "hidden_size")
        super().__init__(
            parts,
            (size, out, out),
            {"projector_hidden_act": "gelu", **hf_config},
            names=("linear_1", "linear_2"),
            activation_key="projector_hidden_act",
            bias=bool(hf_config.get("multimodal_projector_bias", False)),
        )
        self.merge_size = positive_int(hf_config, "spatial_merge_size", 2)
        self.norm = parts.rms_norm(size, norm_eps(hf_config, "rms_norm_eps", 1e-6))
        merging = parts.linear(size * self.merge_size**2, size, bias=False)
        self.patch_merger = nn.ModuleDict({"merging_layer": merging})

    def merge(self, states: torch.Tensor, columns: int) -> torch.Tensor:
        """Patches [rows * columns, size], row by row, to [n, hidden size of the decoder]."""
        normed, _ = self.norm(states)
        size, merge = states.shape[1], self.merge_size
        grid = normed.view(-1, merge, columns // merge, merge, size)
        # A value of all patches of a square, then the next value.
        joined = grid.permute(0, 2, 4, 1, 3).reshape(-1, size * merge**2)
        return self(self.patch_merger["merging_layer"](joined))  # type: ignore[no-any-return]


class Mistral3ForConditionalGeneration(VisionLanguageModel):
    """A Mistral Small with its eyes."""

    def add_tower(self, hf_config: Mapping[str, Any], parts: TowerParts) -> None:
        vision = hf_config["vision_config"]
        if vision["model_type"] != "pixtral":
            raise ConfigError(
                f"config.json: vision_config has model_type={shown(vision['model_type'])}, but"
                f" Mistral 3 is supported with 'pixtral' only."
            )
        layers = kept_layers(hf_config, positive_int(vision, "num_hidden_layers"), default=-1)
        if len(layers) != 1:
            raise ConfigError(
                f"config.json: vision_feature_layer={layers} must be one of the tower's layers."
            )
        self.vision_tower = PixtralVisionModel(vision, parts, kept_layers=layers)
        self.multi_modal_projector = Mistral3Projector(
            hf_config, parts, self.vision_tower.hidden_size
        )

    def embed_image(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of one image whose edges are multiples of a square's."""
        (image,) = pixel_values(inputs)
        columns = image.shape[-1] // self.vision_tower.patch_size
        return self.multi_modal_projector.merge(self.vision_tower(image), columns)

    def unused_in_tower(self) -> tuple[str, ...]:
        return self.vision_tower.unused_prefixes("vision_tower")
