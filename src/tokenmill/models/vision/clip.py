"""The vision transformers of CLIP and SigLIP, and that of Idefics3, for images of any size.

patches -> + positions -> ( norm )  -> ( norm -> attention -> + -> norm -> MLP -> + )* -> ( norm )

             class token    norm in front    norm behind    positions
CLIP         yes            yes              not read       of a fixed grid
SigLIP       no             no               not read       of a fixed grid
Idefics3     no             no               yes            those of the grid that are nearest
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenmill.config.parameters import positive_int
from tokenmill.layers.embedding import EmbeddingTable
from tokenmill.layers.patch_embedding import cut_patches
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot
from tokenmill.models.config import norm_eps
from tokenmill.models.vision.blocks import PatchAttention, TowerMLP, TowerParts

_ANY_SIZE = ("idefics3", "idefics3_vision", "smolvlm_vision")


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """What a tower reads from a `vision_config`."""

    hidden_size: int
    num_layers: int
    num_channels: int
    image_size: int
    patch_size: int
    norm_eps: float
    has_class_token: bool
    takes_any_size: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> TowerConfig:
        """Raises `ConfigError` that names the key at fault."""
        return cls(
            hidden_size=positive_int(config, "hidden_size"),
            num_layers=positive_int(config, "num_hidden_layers"),
            num_channels=positive_int(config, "num_channels"),
            image_size=positive_int(config, "image_size"),
            patch_size=positive_int(config, "patch_size"),
            norm_eps=norm_eps(config, "layer_norm_eps", 1e-6),
            has_class_token=config.get("model_type") == "clip_vision_model",
            takes_any_size=config.get("model_type") in _ANY_SIZE,
        )

    @property
    def side(self) -> int:
        """Patches of an edge of the grid that positions are of."""
        return self.image_size // self.patch_size

    @property
    def num_positions(self) -> int:
        return self.side**2 + self.has_class_token


class TowerEmbeddings(nn.Module):
    """Patches, and where they are."""

    def __init__(self, config: TowerConfig, parts: TowerParts) -> None:
        super().__init__()
        self.config = config
        size, patch = config.hidden_size, config.patch_size
        self.patch_embedding = parts.patch_embedding(
            (config.num_channels, patch, patch), size, bias=not config.has_class_token
        )
        self.position_embedding = EmbeddingTable(config.num_positions, size)
        self.class_embedding = (
            empty_parameter(size, dtype=torch.float32) if config.has_class_token else None
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        if self.class_embedding is not None:
            yield parameter_slot(f"{prefix}.class_embedding", self.class_embedding)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Image [channels, height, width] to float32 [num_positions, hidden_size]."""
        x = self.patch_embedding(cut_patches(image, self.config.patch_size)).float()
        if self.class_embedding is not None:
            x = torch.cat([self.class_embedding[None], x])
        return x + self.position_embedding(self.positions(image))  # type: ignore[no-any-return]

    def positions(self, image: torch.Tensor) -> torch.Tensor:
        """Rows of the table of positions, int64, for all of what an image becomes."""
        config = self.config
        rows, columns = (edge // config.patch_size for edge in image.shape[1:])
        if not config.takes_any_size:
            assert (rows, columns) == (config.side, config.side), "processors see to it"
            return torch.arange(config.num_positions, device=image.device)
        nearest = [_nearest_positions(count, config.side) for count in (rows, columns)]
        grid = nearest[0][:, None] * config.side + nearest[1]
        return grid.flatten().to(image.device)


def _nearest_positions(count: int, side: int) -> torch.Tensor:
    """For each of `count` patches of an edge, that of `side` positions in which it begins.

    In float32, in which some patches begin before their own position: towers were trained so.
    """
    begins = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(float(count)))
    borders = torch.arange(1 / side, 1.0, 1 / side)
    return torch.bucketize(begins.clamp(max=1.0 - 1e-6), borders, right=True)


class TowerLayer(nn.Module):
    """Attention, then MLP, each behind a norm and added to the stream, which is float32."""

    def __init__(
        self, config: TowerConfig, parts: TowerParts, hf_config: Mapping[str, Any]
    ) -> None:
        super().__init__()
        size = config.hidden_size
        num_heads = positive_int(hf_config, "num_attention_heads")
        middle = positive_int(hf_config, "intermediate_size")
        self.self_attn = PatchAttention(parts, size, num_heads)
        self.mlp = TowerMLP(parts, (size, middle, size), hf_config)
        self.layer_norm1 = parts.layer_norm(size, config.norm_eps)
        self.layer_norm2 = parts.layer_norm(size, config.norm_eps)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.layer_norm1(x, residual)
        normed, residual = self.layer_norm2(self.self_attn(normed), residual)
        return self.mlp(normed), residual


class _Encoder(nn.Module):
    """The layers, under the name that checkpoints have for them."""

    def __init__(self, layers: list[TowerLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class VisionTransformer(nn.Module):
    """The tower: an image's hidden states, or those of several layers side by side."""

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        parts: TowerParts,
        *,
        kept_layers: Sequence[int] | None = None,
    ) -> None:
        """The states behind `kept_layers` are the result, 0 for those in front of the first; by
        default those of the last behind the norm at the end. What lies behind is not made.
        """
        super().__init__()
        config = TowerConfig.from_hf(hf_config)
        self.config = config
        self.kept_layers = kept_layers
        num_layers = config.num_layers if kept_layers is None else max(kept_layers)
        self.embeddings = TowerEmbeddings(config, parts)
        if config.has_class_token:
            self.pre_layrnorm = parts.layer_norm(config.hidden_size, config.norm_eps)
        self.encoder = _Encoder([TowerLayer(config, parts, hf_config) for _ in range(num_layers)])
        if kept_layers is None:
            self.post_layernorm = parts.layer_norm(config.hidden_size, config.norm_eps)

    def unused_prefixes(self, name: str) -> tuple[str, ...]:
        """Beginnings of what a checkpoint has beyond this, for a tower called `name`."""
        made = len(self.encoder.layers)
        layers = (
            f"{name}.encoder.layers.{index}." for index in range(made, self.config.num_layers)
        )
        norm = () if self.kept_layers is None else (f"{name}.post_layernorm.",)
        return (*layers, *norm, f"{name}.head.")

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Image [channels, height, width] to [num_positions, hidden_size], or what layers kept."""
        x = self.embeddings(image)
        if self.config.has_class_token:
            x, _ = self.pre_layrnorm(x)
        residual: torch.Tensor | None = None
        kept = {0: x.float()}
        for index, layer in enumerate(self.encoder.layers, start=1):
            x, residual = layer(x, residual)
            if self.kept_layers is not None and index in self.kept_layers:
                kept[index] = residual + x
        if self.kept_layers is None:
            return self.post_layernorm(x, residual)[0]  # type: ignore[no-any-return]
        return torch.cat([kept[index] for index in self.kept_layers], dim=-1)
