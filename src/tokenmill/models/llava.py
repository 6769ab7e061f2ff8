"""LLaVA: hidden states of a CLIP, SigLIP or Pixtral, projected to what a decoder reads.

image -> tower -> states behind some layers -> ( all but the first ) -> linear -> GELU -> linear
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tokenmill.config.parameters import positive_int
from tokenmill.errors import ConfigError, shown
from tokenmill.models.vision.blocks import TowerMLP, TowerParts, kept_layers
from tokenmill.models.vision.clip import VisionTransformer
from tokenmill.models.vision.pixels import pixel_values
from tokenmill.models.vision.pixtral import PixtralVisionModel
from tokenmill.models.vision_language import VisionLanguageModel

Tower = VisionTransformer | PixtralVisionModel


class LlavaForConditionalGeneration(VisionLanguageModel):
    """A LLaVA 1.5, or one of its relatives with another tower or decoder."""

    towers: ClassVar[Mapping[str, type[Tower]]] = {
        "clip_vision_model": VisionTransformer,
        "siglip_vision_model": VisionTransformer,
        "pixtral": PixtralVisionModel,
    }
    """By the `model_type` of a `vision_config`."""

    def add_tower(self, hf_config: Mapping[str, Any], parts: TowerParts) -> None:
        vision = hf_config["vision_config"]
        tower = self.towers.get(vision["model_type"])
        if tower is None:
            raise ConfigError(
                f"config.json: vision_config has model_type={shown(vision['model_type'])}, which"
                f" LLaVA is not supported with; these are: {', '.join(self.towers)}."
            )
        layers = kept_layers(hf_config, positive_int(vision, "num_hidden_layers"), default=-2)
        self.vision_tower = tower(vision, parts, kept_layers=layers)
        hidden_size = positive_int(hf_config, "hidden_size")
        features = len(layers) * positive_int(vision, "hidden_size")
        self.multi_modal_projector = TowerMLP(
            parts,
            (features, hidden_size, hidden_size),
            {"projector_hidden_act": "gelu", **hf_config},
            names=("linear_1", "linear_2"),
            activation_key="projector_hidden_act",
            bias=hf_config.get("multimodal_projector_bias", True),
        )
        self.drops_first = drops_first(hf_config)
        self.dtype = parts.dtype

    def embed_image(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of one image, of the tower's size where that has one."""
        (image,) = pixel_values(inputs)
        return self.embed_tile(image)

    def embed_tile(self, image: torch.Tensor) -> torch.Tensor:
        """Pixels [channels, height, width] to [n, hidden_size]."""
        states = self.vision_tower(image)[int(self.drops_first) :]
        return self.multi_modal_projector(states.to(self.dtype))  # type: ignore[no-any-return]

    def unused_in_tower(self) -> tuple[str, ...]:
        return self.vision_tower.unused_prefixes("vision_tower")


def drops_first(hf_config: Mapping[str, Any]) -> bool:
    """Whether the first of the tower's states, the class token of a CLIP, is left out.

    Raises `ConfigError` for another strategy than `default` and `full`.
    """
    strategy = hf_config.get("vision_feature_select_strategy") or "default"
    if strategy not in ("default", "full"):
        raise ConfigError(
            f"config.json: vision_feature_select_strategy={shown(strategy)} is not supported;"
            f" 'default' and 'full' are."
        )
    return bool(strategy == "default")
