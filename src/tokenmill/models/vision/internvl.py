"""The tower of InternVL, for tiles of one size.

    patches -> + positions -> ( norm -> attention -> * -> + -> norm -> MLP -> * -> + )* -> ( norm )

A class token stands in front. What a block adds to the stream is scaled by a learned vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tokenmill.config.parameters import positive_int
from tokenmill.errors import ConfigError, shown
from tokenmill.layers.norm import LayerNorm, RMSNorm
from tokenmill.layers.patch_embedding import cut_patches
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot
from tokenmill.models.config import norm_eps
from tokenmill.models.vision.blocks import PatchAttention, TowerMLP, TowerParts

_HEADS_EPS = 1e-6


def _norm(hf_config: Mapping[str, Any], parts: TowerParts, size: int) -> LayerNorm | RMSNorm:
    kind, eps = hf_config["norm_type"], norm_eps(hf_config, "layer_norm_eps", 1e-6)
    if kind not in ("layer_norm", "rms_norm"):
        raise ConfigError(
            f"config.json: vision_config has norm_type={shown(kind)}, but must have one of:"
            f" layer_norm, rms_norm."
        )
    return parts.layer_norm(size, eps) if kind == "layer_norm" else parts.rms_norm(size, eps)


class InternVLEmbeddings(nn.Module):
    """Patches behind a class token, and where they are."""

    def __init__(self, hf_config: Mapping[str, Any], parts: TowerParts) -> None:
        super().__init__()
        size = positive_int(hf_config, "hidden_size")
        self.patch_size = positive_int(hf_config, "patch_size")
        self.side = positive_int(hf_config, "image_size") // self.patch_size
        patch = (positive_int(hf_config, "num_channels"), self.patch_size, self.patch_size)
        projection = parts.patch_embedding(patch, size, bias=True)
        self.patch_embeddings = nn.ModuleDict({"projection": projection})
        self.cls_token = empty_parameter(1, 1, size, dtype=torch.float32)
        self.position_embeddings = (
            empty_parameter(1, self.side**2 + 1, size, dtype=torch.float32)
            if hf_config.get("use_absolute_position_embeddings", True)
            else None
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield parameter_slot(f"{prefix}.cls_token", self.cls_token)
        if self.position_embeddings is not None:
            yield parameter_slot(f"{prefix}.position_embeddings", self.position_embeddings)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Image [channels, height, width] to float32 [1 + patches, hidden_size]."""
        patches = self.patch_embeddings["projection"](cut_patches(image, self.patch_size))
        x = torch.cat([self.cls_token[0], patches.float()])
        return x if self.position_embeddings is None else x + self.position_embeddings[0]


class InternVLTowerLayer(nn.Module):
    """Attention, then MLP, each behind a norm, scaled, and added to the stream in float32."""

    def __init__(self, hf_config: Mapping[str, Any], parts: TowerParts) -> None:
        super().__init__()
        size = positive_int(hf_config, "hidden_size")
        self.attention = PatchAttention(
            parts,
            size,
            positive_int(hf_config, "num_attention_heads"),
            out_name="projection_layer",
            bias=bool(hf_config.get("attention_bias", False)),
            out_bias=True,
            norm_eps=_HEADS_EPS if hf_config.get("use_qk_norm") else None,
        )
        middle = positive_int(hf_config, "intermediate_size")
        self.mlp = TowerMLP(parts, (size, middle, size), hf_config)
        self.layernorm_before = _norm(hf_config, parts, size)
        self.layernorm_after = _norm(hf_config, parts, size)
        self.lambda_1 = empty_parameter(size, dtype=torch.float32)
        self.lambda_2 = empty_parameter(size, dtype=torch.float32)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield parameter_slot(f"{prefix}.lambda_1", self.lambda_1)
        yield parameter_slot(f"{prefix}.lambda_2", self.lambda_2)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.layernorm_before(x, residual)
        attended = self.attention(normed) * self.lambda_1
        normed, residual = self.layernorm_after(attended, residual)
        return self.mlp(normed) * self.lambda_2, residual


class InternVLVisionModel(nn.Module):
    """The tower: a tile's hidden states behind one of its layers, the class token's first."""

    def __init__(self, hf_config: Mapping[str, Any], parts: TowerParts, *, kept_layer: int) -> None:
        """`kept_layer` is 0 for the states in front of the first; what lies behind is not made."""
        super().__init__()
        self.num_layers = positive_int(hf_config, "num_hidden_layers")
        self.embeddings = InternVLEmbeddings(hf_config, parts)
        layers = nn.ModuleList(InternVLTowerLayer(hf_config, parts) for _ in range(kept_layer))
        self.encoder = nn.ModuleDict({"layer": layers})
        has_norm = kept_layer == self.num_layers and not hf_config["use_mean_pooling"]
        eps = norm_eps(hf_config, "layer_norm_eps", 1e-6)
        size = positive_int(hf_config, "hidden_size")
        self.layernorm = parts.layer_norm(size, eps) if has_norm else None

    def unused_prefixes(self, name: str) -> tuple[str, ...]:
        """Beginnings of what a checkpoint has beyond this, for a tower called `name`."""
        layers = self.encoder["layer"]
        assert isinstance(layers, nn.ModuleList)
        beyond = (f"{name}.encoder.layer.{i}." for i in range(len(layers), self.num_layers))
        norm = (f"{name}.layernorm.",) if self.layernorm is None else ()
        return (*beyond, *norm, f"{name}.embeddings.mask_token")

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Image [channels, height, width] to [1 + patches, hidden_size]."""
        x = self.embeddings(image)
        residual: torch.Tensor | None = None
        layers = self.encoder["layer"]
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            x, residual = layer(x, residual)
        if self.layernorm is not None:
            return self.layernorm(x, residual)[0]  # type: ignore[no-any-return]
        return x if residual is None else torch.add(residual, x)
