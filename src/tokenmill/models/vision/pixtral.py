"""The tower of Pixtral and Mistral Small 3.1, for images of any size.

    patches -> norm -> ( norm -> attention -> + -> norm -> gated MLP -> + )*

Norms are RMSNorm, and there are no biases. Queries and keys are rotated by the patch's row and
column, which have every second frequency each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tokenmill.config.parameters import number, positive_int
from tokenmill.layers.patch_attention import Angles
from tokenmill.layers.patch_embedding import cut_patches
from tokenmill.models.vision.blocks import PatchAttention, TowerGatedMLP, TowerParts

_EPS = 1e-5


class PixtralLayer(nn.Module):
    """Attention, then MLP, each behind a norm and added to the stream, which is float32."""

    def __init__(self, hf_config: Mapping[str, Any], parts: TowerParts) -> None:
        super().__init__()
        size = positive_int(hf_config, "hidden_size")
        num_heads = positive_int(hf_config, "num_attention_heads")
        middle = positive_int(hf_config, "intermediate_size")
        self.attention = PatchAttention(parts, size, num_heads, out_name="o_proj", bias=False)
        self.feed_forward = TowerGatedMLP(parts, size, middle, hf_config, bias=False)
        self.attention_norm = parts.rms_norm(size, _EPS)
        self.ffn_norm = parts.rms_norm(size, _EPS)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        angles: Angles,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.attention_norm(x, residual)
        normed, residual = self.ffn_norm(self.attention(normed, angles), residual)
        return self.feed_forward(normed), residual


class PixtralVisionModel(nn.Module):
    """The tower: an image's hidden states behind some layers, side by side."""

    def __init__(
        self, hf_config: Mapping[str, Any], parts: TowerParts, *, kept_layers: Sequence[int]
    ) -> None:
        """`kept_layers` as of `VisionTransformer`; what lies behind them is not made."""
        super().__init__()
        size = positive_int(hf_config, "hidden_size")
        self.hidden_size = size
        self.patch_size = positive_int(hf_config, "patch_size")
        self.num_layers = positive_int(hf_config, "num_hidden_layers")
        self.kept_layers = kept_layers
        self.head_size = size // positive_int(hf_config, "num_attention_heads")
        rope = hf_config.get("rope_parameters") or hf_config
        self.rope_theta = number(rope, "rope_theta", 10_000.0)
        channels = positive_int(hf_config, "num_channels", 3)
        self.patch_conv = parts.patch_embedding(
            (channels, self.patch_size, self.patch_size), size, bias=False
        )
        self.ln_pre = parts.rms_norm(size, _EPS)
        layers = nn.ModuleList(PixtralLayer(hf_config, parts) for _ in range(max(kept_layers)))
        self.transformer = nn.ModuleDict({"layers": layers})

    def unused_prefixes(self, name: str) -> tuple[str, ...]:
        """Beginnings of what a checkpoint has beyond this, for a tower called `name`."""
        beyond = range(max(self.kept_layers), self.num_layers)
        return tuple(f"{name}.transformer.layers.{index}." for index in beyond)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Image [channels, height, width] to [patches, hidden_size * number of layers kept], row by
        row.
        """
        x, _ = self.ln_pre(self.patch_conv(cut_patches(image, self.patch_size)))
        turns = self._turns(*(edge // self.patch_size for edge in image.shape[1:]))
        turns = turns.to(image.device)
        angles = (turns.cos(), turns.sin())
        residual: torch.Tensor | None = None
        kept = {0: x.float()}
        layers = self.transformer["layers"]
        assert isinstance(layers, nn.ModuleList)
        for index, layer in enumerate(layers, start=1):
            x, residual = layer(x, residual, angles)
            if index in self.kept_layers:
                kept[index] = residual + x
        return torch.cat([kept[index] for index in self.kept_layers], dim=-1)

    def _turns(self, rows: int, columns: int) -> torch.Tensor:
        """Radians of each patch, float32 [N, head_size / 2]."""
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size
        frequencies = 1.0 / self.rope_theta**exponents
        by_row = torch.arange(rows, dtype=torch.float32)[:, None] * frequencies[0::2]
        by_column = torch.arange(columns, dtype=torch.float32)[:, None] * frequencies[1::2]
        return torch.cat(
            [by_row.repeat_interleave(columns, dim=0), by_column.repeat(rows, 1)], dim=-1
        )
