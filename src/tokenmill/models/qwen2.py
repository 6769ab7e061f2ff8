"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values.

With `use_sliding_window`, the layers from `max_window_layers` on have a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tokenmill.config.windows import layer_windows
from tokenmill.models.config import DecoderConfig
from tokenmill.models.decoder import Decoder, LayerParts, PreNormLayer


def qwen_config(hf_config: Mapping[str, Any]) -> DecoderConfig:
    """The config of any Qwen; raises `ConfigError` that names the key at fault."""
    return DecoderConfig.from_hf(hf_config, windows=layer_windows(hf_config, "Qwen"))


class Qwen2ForCausalLM(Decoder):
    """A Qwen2 with its output head."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, Any]) -> DecoderConfig:
        return qwen_config(hf_config)

    @classmethod
    def make_layer(cls, parts: LayerParts, hf_config: Mapping[str, Any]) -> nn.Module:
        return PreNormLayer(parts, parts.attention(bias=True, out_bias=False), parts.gated_mlp())
