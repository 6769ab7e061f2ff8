"""Qwen3: Llama with RMSNorm over each head's queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tokenmill.models.config import DecoderConfig
from tokenmill.models.decoder import Decoder, LayerParts, PreNormLayer
from tokenmill.models.qwen2 import qwen_config


class Qwen3ForCausalLM(Decoder):
    """A dense Qwen3 with its output head."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, Any]) -> DecoderConfig:
        return qwen_config(hf_config)

    @classmethod
    def make_layer(cls, parts: LayerParts, hf_config: Mapping[str, Any]) -> nn.Module:
        return PreNormLayer(parts, parts.attention(**parts.head_norms()), parts.gated_mlp())
