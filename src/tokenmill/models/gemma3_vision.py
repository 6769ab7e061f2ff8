"""Gemma 3 with its tower: a SigLIP, of whose patches neighbouring squares are averaged.

image -> tower -> norm -> mean of each square -> norm -> matrix

The tokens of an image see each other in both directions (`attention/items.py`), in layers with a
window as far back as any token there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tokenmill.config.parameters import positive_int
from tokenmill.errors import ConfigError
from tokenmill.layers.linear import Linear
from tokenmill.layers.weights import WeightSlot
from tokenmill.models.gemma2 import GemmaDecoder
from tokenmill.models.vision.blocks import TowerParts
from tokenmill.models.vision.clip import TowerConfig, VisionTransformer
from tokenmill.models.vision.pixels import pixel_values
from tokenmill.models.vision_language import VisionLanguageModel


class _Matrix(Linear):
    """A projection that checkpoints keep as a bare [in_features, out_features]."""

    def __init__(self, in_features: int, out_features: int, parts: TowerParts) -> None:
        super().__init__(
            in_features,
            out_features,
            bias=False,
            dtype=parts.dtype,
            kernels=parts.kernels,
            is_transposed=True,
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        for slot in super().weight_slots(prefix):
            yield replace(slot, name=slot.name.removesuffix(".weight"))


class Gemma3MultiModalProjector(nn.Module):
    """Averages squares of neighbouring patches and projects them to what the decoder reads."""

    def __init__(self, hf_config: Mapping[str, Any], parts: TowerParts, tower: TowerConfig) -> None:
        """Raises `ConfigError` for a number of tokens that no squares make."""
        super().__init__()
        num_tokens = positive_int(hf_config, "mm_tokens_per_image", 256)
        self.tokens_per_side = math.isqrt(num_tokens)
        if self.tokens_per_side**2 != num_tokens or tower.side % self.tokens_per_side:
            raise ConfigError(
                f"config.json: mm_tokens_per_image={num_tokens} must be a square of a number that"
                f" divides the tower's {tower.side} patches an edge."
            )
        size = tower.hidden_size
        self.mm_soft_emb_norm = parts.rms_norm(size, tower.norm_eps, weight_offset=1.0)
        out_size = positive_int(hf_config, "hidden_size")
        self.mm_input_projection_weight = _Matrix(size, out_size, parts)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Patches [side * side, values], row by row, to [n, hidden_size]."""
        side, size = self.tokens_per_side, states.shape[1]
        edge = math.isqrt(len(states)) // side
        squares = states.float().view(side, edge, side, edge, size)
        normed, _ = self.mm_soft_emb_norm(squares.mean((1, 3)).view(-1, size))
        return self.mm_input_projection_weight(normed)  # type: ignore[no-any-return]


class Gemma3ForConditionalGeneration(VisionLanguageModel, GemmaDecoder):
    """A Gemma 3 with its eyes."""

    def add_tower(self, hf_config: Mapping[str, Any], parts: TowerParts) -> None:
        self.vision_tower = VisionTransformer(hf_config["vision_config"], parts)
        self.multi_modal_projector = Gemma3MultiModalProjector(
            hf_config, parts, self.vision_tower.config
        )

    def embed_image(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of one image of the tower's size."""
        (image,) = pixel_values(inputs)
        return self.multi_modal_projector(self.vision_tower(image))  # type: ignore[no-any-return]

    def unused_in_tower(self) -> tuple[str, ...]:
        return self.vision_tower.unused_prefixes("vision_tower")
