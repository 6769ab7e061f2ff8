"""The tower of Qwen3-VL, for images of any size.

    patches -> + positions -> ( norm -> attention -> + -> norm -> MLP -> + )* -> squares -> MLP

Positions are learned for a grid, between whose points they are interpolated; queries and keys are
rotated by row and column, too. States behind some layers become embeddings of their own, for layers
of the decoder (Meng et al., 2024, DeepStack).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tokenmill.config.parameters import positive_int
from tokenmill.errors import ConfigError, shown
from tokenmill.kernels.gelu import gelu
from tokenmill.layers.embedding import EmbeddingTable
from tokenmill.layers.patch_attention import Angles
from tokenmill.models.vision.blocks import PatchAttention, TowerMLP, TowerParts
from tokenmill.models.vision.qwen2_vl import (
    QwenTowerConfig,
    by_square,
    patches_by_square,
    turns_by_square,
)

_EPS = 1e-6


class Qwen3TowerLayer(nn.Module):
    """Attention, then MLP, each behind a norm and added to the stream, which is float32."""

    def __init__(
        self, config: QwenTowerConfig, parts: TowerParts, hf_config: Mapping[str, Any]
    ) -> None:
        super().__init__()
        size, middle = config.hidden_size, config.intermediate_size
        self.attn = PatchAttention(parts, size, config.num_heads, out_name="proj", is_fused=True)
        names = ("linear_fc1", "linear_fc2")
        self.mlp = TowerMLP(parts, (size, middle, size), hf_config, names=names)
        self.norm1 = parts.layer_norm(size, _EPS)
        self.norm2 = parts.layer_norm(size, _EPS)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.norm1(x, residual)
        normed, residual = self.norm2(self.attn(normed, angles), residual)
        return self.mlp(normed), residual


class Qwen3PatchMerger(nn.Module):
    """Squares of patches to embeddings, normalised as patches, or with `joins_first` as squares."""

    def __init__(self, config: QwenTowerConfig, parts: TowerParts, *, joins_first: bool) -> None:
        super().__init__()
        self.width = config.hidden_size * config.merge_size**2
        self.joins_first = joins_first
        self.norm = parts.layer_norm(self.width if joins_first else config.hidden_size, _EPS)
        self.linear_fc1 = parts.linear(self.width, self.width)
        self.linear_fc2 = parts.linear(self.width, config.out_size)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Patches [N, hidden_size], float32, to [squares, out_size]."""
        if self.joins_first:
            states = states.view(-1, self.width)
        normed, _ = self.norm(states)
        hidden = gelu(self.linear_fc1(normed.reshape(-1, self.width)))
        return self.linear_fc2(hidden)  # type: ignore[no-any-return]


class Qwen3VisionTransformer(nn.Module):
    """The tower with its ways to the decoder."""

    def __init__(self, hf_config: Mapping[str, Any], parts: TowerParts) -> None:
        super().__init__()
        config = QwenTowerConfig.from_hf(hf_config)
        self.config = config
        projection = parts.patch_embedding(config.patch, config.hidden_size, bias=True)
        self.patch_embed = nn.ModuleDict({"proj": projection})
        self.side = _side(hf_config)
        self.pos_embed = EmbeddingTable(self.side**2, config.hidden_size)
        self.blocks = nn.ModuleList(
            Qwen3TowerLayer(config, parts, hf_config) for _ in range(config.num_layers)
        )
        self.merger = Qwen3PatchMerger(config, parts, joins_first=False)
        self.levels = _levels(hf_config, config.num_layers)
        """Layers whose states become embeddings of their own."""
        self.deepstack_merger_list = nn.ModuleList(
            Qwen3PatchMerger(config, parts, joins_first=True) for _ in self.levels
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Image [channels, height, width] to [n, out_size * (1 + levels)], row by row; what is for
        the decoder's first layers follows the embedding.

        Edges are multiples of a square's.
        """
        rows, columns = (edge // self.config.patch_size for edge in image.shape[1:])
        turns = turns_by_square(rows, columns, self.config).to(image.device)
        angles = (turns.cos(), turns.sin())
        x = self.patch_embed["proj"](patches_by_square(image, self.config))
        x = x.float() + self._positions(rows, columns)
        residual: torch.Tensor | None = None
        levels = {}
        for index, block in enumerate(self.blocks):
            x, residual = block(x, residual, angles)
            if index in self.levels:
                merger = self.deepstack_merger_list[self.levels.index(index)]
                levels[index] = merger(residual + x)
        assert residual is not None
        embeds = self.merger(residual + x)
        return torch.cat([embeds, *(levels[index] for index in self.levels)], dim=-1)

    def _positions(self, rows: int, columns: int) -> torch.Tensor:
        """float32 [N, hidden_size]: between the four points of the grid around each patch."""
        weight = self.pos_embed.weight
        (top, below), (left, right) = (self._neighbours(count) for count in (rows, columns))
        total = weight.new_zeros(rows, columns, weight.shape[1])
        for row, row_share in (top, below):
            for column, column_share in (left, right):
                places = (row[:, None] * self.side + column).to(weight.device)
                share = (row_share[:, None] * column_share)[..., None].to(weight.device)
                total += self.pos_embed(places) * share
        return by_square(total, self.config.merge_size)

    def _neighbours(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For `count` patches of an edge, spread over the grid's from end to end: the points before
        and behind each, int64, and their shares, float32.
        """
        places = torch.arange(count, dtype=torch.float32) * (self.side - 1) / max(count - 1, 1)
        before = places.floor()
        behind = (before + 1).clamp(max=self.side - 1)
        share = places - before
        return [(before.long(), 1 - share), (behind.long(), share)]


def _side(config: Mapping[str, Any]) -> int:
    count = positive_int(config, "num_position_embeddings")
    side = math.isqrt(count)
    if side**2 != count:
        raise ConfigError(f"config.json: num_position_embeddings={count} is no square.")
    return side


def _levels(config: Mapping[str, Any], num_layers: int) -> list[int]:
    listed = config.get("deepstack_visual_indexes")
    if not isinstance(listed, list | tuple) or not all(
        isinstance(each, int) and 0 <= each < num_layers for each in listed
    ):
        raise ConfigError(
            f"config.json: deepstack_visual_indexes is {shown(listed)}, but must list some of the"
            f" tower's {num_layers} layers."
        )
    return list(listed)
