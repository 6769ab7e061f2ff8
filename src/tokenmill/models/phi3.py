"""Phi-3, Phi-3.5 and Phi-4: Llama with merged matrices in the checkpoint.

Phi-4-mini rotates a part of each head (`partial_rotary_factor`). The long contexts are `longrope`,
whose divisors are chosen by `max_model_len` once and for all (layers/rope.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tokenmill.models.decoder import Decoder, LayerParts, PreNormLayer


class Phi3ForCausalLM(Decoder):
    """A Phi-3 or Phi-4 with its output head."""

    @classmethod
    def make_layer(cls, parts: LayerParts, hf_config: Mapping[str, Any]) -> nn.Module:
        return PreNormLayer(parts, parts.attention(is_fused=True), parts.gated_mlp(is_fused=True))
