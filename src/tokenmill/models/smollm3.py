"""SmolLM3: Llama without RoPE in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tokenmill.config.parameters import positive_int, read_parameters
from tokenmill.errors import ConfigError, shown
from tokenmill.models.config import DecoderConfig, layer_windows
from tokenmill.models.decoder import Decoder, LayerParts, PreNormLayer


class SmolLM3ForCausalLM(Decoder):
    """A SmolLM3 with its output head."""

    config_defaults = {"tie_word_embeddings": True}

    @classmethod
    def read_config(cls, hf_config: Mapping[str, Any]) -> DecoderConfig:
        num_layers = read_parameters(hf_config).num_layers
        windows: tuple[int | None, ...] = (None,) * num_layers
        if hf_config.get("use_sliding_window"):
            windows = layer_windows(
                hf_config, num_layers, lambda layer: not has_rope(hf_config, layer)
            )
        return DecoderConfig.from_hf(hf_config, windows=windows)

    @classmethod
    def make_layer(cls, parts: LayerParts, hf_config: Mapping[str, Any]) -> nn.Module:
        rotary = parts.rotary if has_rope(hf_config, parts.index) else None
        return PreNormLayer(parts, parts.attention(rotary=rotary), parts.gated_mlp())


def has_rope(hf_config: Mapping[str, Any], layer: int) -> bool:
    """As `no_rope_layers` says (1 has it), or else by `no_rope_layer_interval`."""
    listed = hf_config.get("no_rope_layers")
    if listed is None:
        return (layer + 1) % positive_int(hf_config, "no_rope_layer_interval", 4) != 0
    if not isinstance(listed, list) or layer >= len(listed):
        raise ConfigError(
            f"config.json: no_rope_layers is {shown(listed)}, but must be a list of 0 and 1 with"
            f" one for each layer."
        )
    return bool(listed[layer])
