"""Qwen3-VL: Qwen2-VL with another tower, which speaks to the first layers of the decoder, too.

    embeddings -> layer 0 -> + level 0 -> layer 1 -> + level 1 -> ...

An image's embedding is followed by what is added behind these layers. Text has none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenmill.errors import ConfigError
from tokenmill.models.base import IntermediateTensors
from tokenmill.models.qwen2_vl import Qwen2VLForConditionalGeneration
from tokenmill.models.vision.blocks import TowerParts
from tokenmill.models.vision.qwen3_vl import Qwen3VisionTransformer


class Qwen3VLForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """A Qwen3-VL, dense or with experts."""

    visual: Qwen3VisionTransformer

    @classmethod
    def make_tower(cls, vision: Mapping[str, Any], parts: TowerParts) -> Qwen3VisionTransformer:
        return Qwen3VisionTransformer(vision, parts)

    def add_tower(self, hf_config: Mapping[str, Any], parts: TowerParts) -> None:
        super().add_tower(hf_config, parts)
        if self.model.is_first_rank and len(self.visual.levels) > len(self.model.layers):
            raise ConfigError(
                f"config.json: deepstack_visual_indexes has {len(self.visual.levels)} layers, more"
                f" than the {len(self.model.layers)} of the decoder, or of its first stage with"
                f" pipeline_parallel_size."
            )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """As of any decoder; `inputs_embeds` may be [num_tokens, hidden_size * (1 + levels)], with
        zeros behind the embeddings of text.
        """
        size = self.hidden_size
        if inputs_embeds is None or inputs_embeds.shape[1] == size:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        num_parts = inputs_embeds.shape[1] // size
        x, *levels = inputs_embeds.chunk(num_parts, dim=1)
        x = x.contiguous()
        # Only rows of images are added to, so that those of text have the bits of steps without.
        (rows,) = inputs_embeds[:, size:].any(dim=1).nonzero(as_tuple=True)
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self.model.layers.values()):
            x, residual = layer(positions, x, residual)
            if index < len(levels):
                assert residual is not None
                residual[rows] += levels[index][rows]
        if not self.model.is_last_rank:
            assert residual is not None
            return {"hidden_states": x, "residual": residual}
        norm = self.model.get_submodule(self.model.norm_name)
        return norm(x, residual)[0]  # type: ignore[no-any-return]
