"""Bamba: state-space layers (Mamba-2), and attention in a few places.

    x -> norm -> mixer or attention -> + -> norm -> gated MLP -> +

Half of each head of attention is rotated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from tokenmill.config.parameters import attention_indices, read_parameters, rope_parameters
from tokenmill.config.state_space import StateSizes
from tokenmill.errors import ConfigError, shown
from tokenmill.kernels.state_space import StateSpaceShape
from tokenmill.layers.state_space import Mamba2Mixer
from tokenmill.models.config import DecoderConfig
from tokenmill.models.decoder import Decoder, LayerParts


class BambaLayer(nn.Module):
    """A mixer, or attention; then MLP, each behind a norm and added to the residual stream."""

    def __init__(self, parts: LayerParts, name: str, block: nn.Module) -> None:
        """`name` is what the checkpoint calls the first block."""
        super().__init__()
        self.name = name
        self.add_module(name, block)
        self.feed_forward = parts.gated_mlp()
        self.input_layernorm = parts.stream_norm(block)  # type: ignore[arg-type]
        self.pre_ff_layernorm = parts.stream_norm(self.feed_forward)

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_layernorm(x, residual)
        x = getattr(self, self.name)(positions, normed)
        normed, residual = self.pre_ff_layernorm(x, residual)
        return self.feed_forward(normed), residual


class BambaForCausalLM(Decoder):
    """A Bamba with its output head."""

    last_norm_name: ClassVar[str] = "final_layernorm"

    @classmethod
    def read_config(cls, hf_config: Mapping[str, Any]) -> DecoderConfig:
        rope = {"partial_rotary_factor": 0.5, **rope_parameters(hf_config)}
        return DecoderConfig.from_hf({**hf_config, "rope_parameters": rope})

    @classmethod
    def make_layer(cls, parts: LayerParts, hf_config: Mapping[str, Any]) -> nn.Module:
        if parts.index in attention_indices(hf_config):
            return BambaLayer(parts, "self_attn", parts.attention())
        return BambaLayer(parts, "mamba", make_mixer(parts, hf_config))


def make_mixer(parts: LayerParts, hf_config: Mapping[str, Any]) -> Mamba2Mixer:
    """The mixer of one layer."""
    sizes = read_parameters(hf_config).states
    assert sizes is not None
    return Mamba2Mixer(
        f"model.layers.{parts.index}.mamba",
        hidden_size=parts.config.hidden_size,
        shape=mixer_shape(hf_config, sizes, parts.config.norm_eps),
        bias=bool(hf_config.get("mamba_proj_bias", False)),
        conv_bias=bool(hf_config.get("mamba_conv_bias", True)),
        dtype=parts.dtype,
        kernels=parts.kernels,
    )


def mixer_shape(
    hf_config: Mapping[str, Any], sizes: StateSizes, norm_eps: float
) -> StateSpaceShape:
    """The form of all mixers of a model."""
    return StateSpaceShape(
        num_heads=sizes.num_heads,
        head_size=sizes.head_size,
        state_size=sizes.state_size,
        num_groups=sizes.num_groups,
        kernel_size=sizes.kernel_size,
        dt_limits=time_step_limits(hf_config),
        norm_eps=norm_eps,
    )


def time_step_limits(hf_config: Mapping[str, Any]) -> tuple[float, float]:
    """The least and the largest step; infinity is a number, its name, or an object with that."""
    given = hf_config.get("time_step_limit") or (0.0, "inf")
    try:
        low, high = (
            float(each["__float__"] if isinstance(each, Mapping) else each) for each in given
        )
    except (TypeError, ValueError, KeyError):
        low, high = 1.0, 0.0
    if not low <= high:
        raise ConfigError(
            f"config.json: time_step_limit={shown(given)} must be two numbers, the least and the"
            f" largest step."
        )
    return low, high
