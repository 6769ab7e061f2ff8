"""Qwen2-VL and Qwen2.5-VL: images of any size, whose tokens have a row and a column.

    image -> tower -> an embedding for each square of patches, row by row

All three positions of a text's token are the same. Those of an image's begin behind the text: the
first stands still, the second counts rows, the third columns; the text behind goes on where the
longer edge ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tokenmill.config.parameters import positive_int
from tokenmill.contracts.request import MultiModalFeature
from tokenmill.errors import ConfigError
from tokenmill.models.vision.blocks import TowerParts
from tokenmill.models.vision.pixels import pixel_values
from tokenmill.models.vision.qwen2_vl import QwenVisionTransformer
from tokenmill.models.vision.qwen3_vl import Qwen3VisionTransformer
from tokenmill.models.vision_language import VisionLanguageModel

Tower = QwenVisionTransformer | Qwen3VisionTransformer


class Qwen2VLForConditionalGeneration(VisionLanguageModel):
    """A Qwen2-VL or a Qwen2.5-VL."""

    def add_tower(self, hf_config: Mapping[str, Any], parts: TowerParts) -> None:
        self.visual = self.make_tower(hf_config["vision_config"], parts)
        config = self.visual.config
        if config.out_size != positive_int(hf_config, "hidden_size"):
            raise ConfigError(
                f"config.json: the tower makes embeddings of {config.out_size} values, but the"
                f" decoder's hidden_size is {hf_config['hidden_size']}."
            )
        self.square = config.patch_size * config.merge_size

    @classmethod
    def make_tower(cls, vision: Mapping[str, Any], parts: TowerParts) -> Tower:
        """Raises `ConfigError` that names the key at fault."""
        return QwenVisionTransformer(vision, parts)

    def embed_image(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of one image whose edges are multiples of a square's."""
        (image,) = pixel_values(inputs)
        return self.visual(image)  # type: ignore[no-any-return]

    def mrope_positions(
        self, token_ids: Sequence[int], features: Sequence[MultiModalFeature]
    ) -> np.ndarray | None:
        if not features:
            return None
        runs, next_token, next_position = [], 0, 0
        for feature in sorted(features, key=lambda each: each.offset):
            _, height, width, _ = feature.inputs["pixels"].shape
            rows, columns = height // self.square, width // self.square
            assert rows * columns == feature.length
            text = _text(feature.offset - next_token, next_position)
            begin = next_position + text.shape[1]
            image = np.indices((1, rows, columns)).reshape(3, -1) + begin
            runs += [text, image]
            next_token = feature.offset + feature.length
            next_position = begin + max(rows, columns)
        return np.concatenate([*runs, _text(len(token_ids) - next_token, next_position)], axis=1)


def _text(count: int, begin: int) -> np.ndarray:
    """Positions of so many tokens of a text, int64 [3, count]."""
    return np.broadcast_to(np.arange(begin, begin + count, dtype=np.int64), (3, count))
