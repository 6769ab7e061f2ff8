"""What towers are made of: attention among all patches of an image, and blocks of two matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenmill.errors import ConfigError, shown
from tokenmill.layers.activations import read_activation
from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.linear import Linear
from tokenmill.layers.linear_method import Activations
from tokenmill.layers.mlp import GatedMLP
from tokenmill.layers.norm import LayerNorm, RMSNorm
from tokenmill.layers.patch_attention import Angles, attend_patches
from tokenmill.layers.patch_embedding import PatchEmbedding
from tokenmill.models.config import GATES


@dataclass(frozen=True, slots=True)
class TowerParts:
    """Makes the parts of a tower in one arithmetic."""

    dtype: torch.dtype
    kernels: LayerKernels

    def linear(
        self, in_features: int, out_features: int | Mapping[str, int], *, bias: bool = True
    ) -> Linear:
        return Linear(in_features, out_features, bias=bias, dtype=self.dtype, kernels=self.kernels)

    def patch_embedding(self, patch: tuple[int, ...], size: int, *, bias: bool) -> PatchEmbedding:
        return PatchEmbedding(patch, size, bias=bias, dtype=self.dtype, kernels=self.kernels)

    def layer_norm(self, size: int, eps: float) -> LayerNorm:
        return LayerNorm(size, eps, dtype=self.dtype, kernels=self.kernels)

    def rms_norm(self, size: int, eps: float, *, weight_offset: float = 0.0) -> RMSNorm:
        return RMSNorm(
            size, eps, dtype=self.dtype, kernels=self.kernels, weight_offset=weight_offset
        )


class PatchAttention(nn.Module):
    """Attention in both directions among the patches of an image.

    Queries, keys and values are one projection of three parts, or with `is_fused`, the checkpoint's
    matrix `qkv`.
    """

    def __init__(
        self,
        parts: TowerParts,
        hidden_size: int,
        num_heads: int,
        *,
        out_name: str = "out_proj",
        is_fused: bool = False,
        bias: bool = True,
        out_bias: bool | None = None,
        norm_eps: float | None = None,
    ) -> None:
        """`out_name` is what the checkpoint calls the projection at the end; its bias is there if
        the others' are, or with `out_bias`. With `norm_eps`, queries and keys have an RMSNorm each,
        over all heads together.
        """
        super().__init__()
        if hidden_size % num_heads:
            raise ConfigError(
                f"config.json: vision_config has {num_heads} heads, which do not divide its"
                f" hidden_size, {hidden_size}."
            )
        self.num_heads = num_heads
        self.kernels = parts.kernels
        names = dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden_size)
        self.qkv = parts.linear(hidden_size, 3 * hidden_size if is_fused else names, bias=bias)
        self.out_name = out_name
        out_bias = bias if out_bias is None else out_bias
        self.add_module(out_name, parts.linear(hidden_size, hidden_size, bias=out_bias))
        self.has_norms = norm_eps is not None
        if norm_eps is not None:
            self.q_norm = parts.rms_norm(hidden_size, norm_eps)
            self.k_norm = parts.rms_norm(hidden_size, norm_eps)

    def forward(
        self,
        x: Activations,
        angles: Angles | None = None,
        lengths: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Map x [N, hidden_size] to the same shape.

        `angles` and `lengths` are those of `attend_patches`.
        """
        qkv = self.qkv(x)
        query, key, value = qkv.view(len(qkv), 3, self.num_heads, -1).unbind(1)
        if self.has_norms:
            query = self.q_norm(query.flatten(1))[0].view(query.shape)
            key = self.k_norm(key.flatten(1))[0].view(key.shape)
        attended = attend_patches(self.kernels, query, key, value, angles=angles, lengths=lengths)
        out: torch.Tensor = self.get_submodule(self.out_name)(attended.flatten(1))
        return out


class TowerMLP(nn.Module):
    """A block of two matrices with an activation between them."""

    def __init__(
        self,
        parts: TowerParts,
        sizes: tuple[int, int, int],
        config: Mapping[str, Any],
        *,
        names: tuple[str, str] = ("fc1", "fc2"),
        activation_key: str = "hidden_act",
        bias: bool = True,
    ) -> None:
        """`sizes` are those of input, middle and output; `names` are the matrices'."""
        super().__init__()
        self.kernels = parts.kernels
        self.names = names
        self.gate = GATES.get(str(config.get(activation_key)))
        self.activation = read_activation(config, activation_key)
        self.add_module(names[0], parts.linear(sizes[0], sizes[1], bias=bias))
        self.add_module(names[1], parts.linear(sizes[1], sizes[2], bias=bias))

    def forward(self, x: Activations) -> torch.Tensor:
        """Map [N, first size] to [N, last size]."""
        first, second = (self.get_submodule(name) for name in self.names)
        assert isinstance(first, Linear)
        assert isinstance(second, Linear)
        wide: torch.Tensor = first(x)
        if self.gate is None:
            return second(self.activation(wide))  # type: ignore[no-any-return]
        activated = second.empty_input(len(wide))  # there is a kernel for it
        self.kernels.activation(wide, self.gate, activated)
        return second(activated)  # type: ignore[no-any-return]


class TowerGatedMLP(GatedMLP):
    """The same with a gate, which may have an activation that has no kernel."""

    def __init__(
        self,
        parts: TowerParts,
        hidden_size: int,
        intermediate_size: int,
        config: Mapping[str, Any],
        *,
        bias: bool,
    ) -> None:
        gate = GATES.get(str(config.get("hidden_act")))
        super().__init__(
            hidden_size,
            intermediate_size,
            bias=bias,
            dtype=parts.dtype,
            kernels=parts.kernels,
            gate=gate or "silu",
        )
        self.own_activation = None if gate else read_activation(config, "hidden_act")

    def forward(self, x: Activations) -> torch.Tensor:
        """Map [N, hidden_size] to the same shape."""
        if self.own_activation is None:
            return super().forward(x)
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.own_activation(gate) * up)  # type: ignore[no-any-return]


def kept_layers(hf_config: Mapping[str, Any], num_layers: int, default: int) -> list[int]:
    """Which of a tower's hidden states `vision_feature_layer` names: 0 are those in front of the
    first layer. Raises `ConfigError` for some that there are not.
    """
    given = hf_config.get("vision_feature_layer", default)
    listed = given if isinstance(given, list) else [given]
    layers = [
        index + num_layers + 1 if isinstance(index, int) and index < 0 else index
        for index in listed
    ]
    if not layers or not all(
        isinstance(index, int) and 0 <= index <= num_layers for index in layers
    ):
        raise ConfigError(
            f"config.json: vision_feature_layer={shown(given)} must be one or several of the"
            f" tower's {num_layers + 1} hidden states, from {-num_layers - 1} to {num_layers}."
        )
    return layers
