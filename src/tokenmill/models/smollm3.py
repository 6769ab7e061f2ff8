"""SmolLM3: Llama without RoPE in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tokenmill.config.windows import has_rope, layer_windows
from tokenmill.models.config import DecoderConfig
from tokenmill.models.decoder import Decoder, LayerParts, PreNormLayer


class SmolLM3ForCausalLM(Decoder):
    """A SmolLM3 with its output head."""

    config_defaults = {"tie_word_embeddings": True}

    @classmethod
    def read_config(cls, hf_config: Mapping[str, Any]) -> DecoderConfig:
        return DecoderConfig.from_hf(hf_config, windows=layer_windows(hf_config, "SmolLM3"))

    @classmethod
    def make_layer(cls, parts: LayerParts, hf_config: Mapping[str, Any]) -> nn.Module:
        rotary = parts.rotary if has_rope(hf_config, parts.index) else None
        return PreNormLayer(parts, parts.attention(rotary=rotary), parts.gated_mlp())
