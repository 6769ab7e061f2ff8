"""The towers of Qwen2-VL and Qwen2.5-VL, for images of any size.

    patches -> ( norm -> attention -> + -> norm -> MLP -> + )* -> norm -> squares of patches -> MLP

Queries and keys are rotated by the patch's row and column. Patches of a square that becomes one
embedding follow one another.

                  norm         MLP      attention
    Qwen2-VL      LayerNorm    plain    among all patches
    Qwen2.5-VL    RMSNorm      gated    within windows, but for some layers
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenmill.config.parameters import number, positive_int
from tokenmill.errors import ConfigError, shown
from tokenmill.kernels.gelu import gelu
from tokenmill.layers.norm import LayerNorm, RMSNorm
from tokenmill.layers.patch_attention import Angles
from tokenmill.models.vision.blocks import PatchAttention, TowerGatedMLP, TowerMLP, TowerParts

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class QwenTowerConfig:
    """What a tower reads from a `vision_config`."""

    hidden_size: int
    out_size: int
    """Values of an embedding."""
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    patch_size: int
    num_frames: int
    """Times that a patch is repeated: it is of a film that stands still."""
    merge_size: int
    """Patches of an edge of the square that becomes one embedding."""
    rope_theta: float
    window_size: int | None
    """Pixels of an edge; None sees everything."""
    full_layers: frozenset[int]
    """Those that see everything although there is a window."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> QwenTowerConfig:
        """Raises `ConfigError` that names the key at fault."""
        has_windows = config.get("window_size") is not None
        is_newer = "out_hidden_size" in config
        hidden_size = positive_int(config, "hidden_size" if is_newer else "embed_dim")
        num_heads = positive_int(config, "num_heads")
        if hidden_size % (4 * num_heads):
            raise ConfigError(
                f"config.json: vision_config has {num_heads} heads of {hidden_size} values; they"
                f" must be multiples of 4, a pair for the row and one for the column."
            )
        rope = config.get("rope_parameters") or {}
        return cls(
            hidden_size=hidden_size,
            out_size=positive_int(config, "out_hidden_size" if is_newer else "hidden_size"),
            intermediate_size=(
                positive_int(config, "intermediate_size")
                if is_newer
                else int(hidden_size * number(config, "mlp_ratio"))
            ),
            num_layers=positive_int(config, "depth"),
            num_heads=num_heads,
            num_channels=positive_int(config, "in_channels", 3),
            patch_size=positive_int(config, "patch_size"),
            num_frames=positive_int(config, "temporal_patch_size"),
            merge_size=positive_int(config, "spatial_merge_size"),
            rope_theta=number(rope, "rope_theta", 10_000.0),
            window_size=positive_int(config, "window_size") if has_windows else None,
            full_layers=_full_layers(config) if has_windows else frozenset(),
        )

    @property
    def patch(self) -> tuple[int, int, int, int]:
        """Values of a patch: channels, frames, height, width."""
        return self.num_channels, self.num_frames, self.patch_size, self.patch_size

    @property
    def window_squares(self) -> int | None:
        """Squares of an edge of a window."""
        if self.window_size is None:
            return None
        return max(self.window_size // self.merge_size // self.patch_size, 1)


def _full_layers(config: Mapping[str, Any]) -> frozenset[int]:
    listed = config.get("fullatt_block_indexes")
    if not isinstance(listed, list | tuple) or not all(isinstance(each, int) for each in listed):
        raise ConfigError(
            f"config.json: fullatt_block_indexes is {shown(listed)}, but must be a list of layers."
        )
    return frozenset(listed)


class QwenTowerLayer(nn.Module):
    """Attention, then MLP, each behind a norm and added to the stream, which is float32."""

    def __init__(
        self, config: QwenTowerConfig, parts: TowerParts, hf_config: Mapping[str, Any]
    ) -> None:
        super().__init__()
        size, middle = config.hidden_size, config.intermediate_size
        self.attn = PatchAttention(parts, size, config.num_heads, out_name="proj", is_fused=True)
        self.mlp = (
            TowerMLP(parts, (size, middle, size), hf_config)
            if config.window_size is None
            else TowerGatedMLP(parts, size, middle, hf_config, bias=True)
        )
        self.norm1 = _stream_norm(config, parts)
        self.norm2 = _stream_norm(config, parts)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        angles: Angles,
        lengths: list[int] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.norm1(x, residual)
        normed, residual = self.norm2(self.attn(normed, angles, lengths), residual)
        return self.mlp(normed), residual


def _stream_norm(config: QwenTowerConfig, parts: TowerParts) -> LayerNorm | RMSNorm:
    kind = parts.layer_norm if config.window_size is None else parts.rms_norm
    return kind(config.hidden_size, _EPS)


class QwenPatchMerger(nn.Module):
    """Squares of patches to embeddings."""

    def __init__(self, config: QwenTowerConfig, parts: TowerParts) -> None:
        super().__init__()
        self.width = config.hidden_size * config.merge_size**2
        self.ln_q = _stream_norm(config, parts)
        # Called as in checkpoints: 1 is the activation.
        self.mlp = nn.ModuleDict(
            {
                "0": parts.linear(self.width, self.width),
                "2": parts.linear(self.width, config.out_size),
            }
        )

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed, _ = self.ln_q(x, residual)
        hidden = gelu(self.mlp["0"](normed.reshape(-1, self.width)))
        return self.mlp["2"](hidden)  # type: ignore[no-any-return]


class QwenVisionTransformer(nn.Module):
    """The tower with its way to the decoder."""

    def __init__(self, hf_config: Mapping[str, Any], parts: TowerParts) -> None:
        super().__init__()
        config = QwenTowerConfig.from_hf(hf_config)
        self.config = config
        projection = parts.patch_embedding(config.patch, config.hidden_size, bias=False)
        self.patch_embed = nn.ModuleDict({"proj": projection})
        self.blocks = nn.ModuleList(
            QwenTowerLayer(config, parts, hf_config) for _ in range(config.num_layers)
        )
        self.merger = QwenPatchMerger(config, parts)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Image [channels, height, width] to [n, out_size], square by square and row by row.

        Edges are multiples of a square's.
        """
        config = self.config
        rows, columns = (edge // config.patch_size for edge in image.shape[1:])
        x = self.patch_embed["proj"](patches_by_square(image, config))
        order, lengths = self._windows(rows // config.merge_size, columns // config.merge_size)
        order = order.to(image.device)
        x = _reordered(x, order, config.merge_size)
        turns = turns_by_square(rows, columns, config).to(image.device)
        turns = _reordered(turns, order, config.merge_size)
        angles = (turns.cos(), turns.sin())
        residual: torch.Tensor | None = None
        for index, block in enumerate(self.blocks):
            runs = None if index in config.full_layers else lengths
            x, residual = block(x, residual, angles, runs)
        assert residual is not None
        merged = self.merger(x, residual)
        return merged[order.argsort()]  # type: ignore[no-any-return]

    def _windows(self, rows: int, columns: int) -> tuple[torch.Tensor, list[int] | None]:
        """The order of squares in which windows are together, int64, and each window's number of
        patches; None where everything is one.
        """
        order = torch.arange(rows * columns)
        edge = self.config.window_squares
        if edge is None:
            return order, None
        grid = order.reshape(rows, columns)
        windows = [
            grid[top : top + edge, left : left + edge].flatten()
            for top in range(0, rows, edge)
            for left in range(0, columns, edge)
        ]
        square = self.config.merge_size**2
        return torch.cat(windows), [len(window) * square for window in windows]


def _reordered(rows: torch.Tensor, order: torch.Tensor, merge_size: int) -> torch.Tensor:
    """Rows of patches [N, size], square by square in another order."""
    squares = rows.view(len(order), merge_size**2, -1)
    return squares[order].flatten(0, 1)


def patches_by_square(image: torch.Tensor, config: QwenTowerConfig) -> torch.Tensor:
    """Image [channels, height, width] to [N, values of a patch], those of a square together."""
    size, merge = config.patch_size, config.merge_size
    channels, height, width = image.shape
    edge = size * merge
    grid = image.reshape(channels, height // edge, merge, size, width // edge, merge, size)
    grid = grid.permute(1, 4, 2, 5, 0, 3, 6)
    frames = grid.unsqueeze(5).expand(*grid.shape[:5], config.num_frames, size, size)
    return frames.reshape(-1, channels * config.num_frames * size**2)


def turns_by_square(rows: int, columns: int, config: QwenTowerConfig) -> torch.Tensor:
    """Radians of each patch, float32 [N, head_size / 2]: by its row, then by its column."""
    half = config.hidden_size // config.num_heads // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
    frequencies = 1.0 / config.rope_theta**exponents
    places = by_square(
        torch.stack(
            torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1
        ),
        config.merge_size,
    )
    return (places[..., None].float() * frequencies).flatten(-2)


def by_square(grid: torch.Tensor, merge_size: int) -> torch.Tensor:
    """Of patches [rows, columns, size], row by row, to [rows * columns, size], square by square."""
    rows, columns, size = grid.shape
    squares = grid.reshape(rows // merge_size, merge_size, columns // merge_size, merge_size, size)
    return squares.transpose(1, 2).reshape(-1, size)
