"""Gemma 3, its text models: Gemma 2 with RMSNorm over each head's queries and keys, without caps.

Five layers with a window are followed by one without. The two kinds have RoPE settings of their
own: older configs say `rope_local_base_freq` for the windowed layers, and `rope_theta` and
`rope_scaling` for the others; newer ones have both in `rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tokenmill.config.windows import layer_windows, windowed_layers
from tokenmill.errors import ConfigError
from tokenmill.layers.rope import RopeConfig
from tokenmill.models.config import DecoderConfig
from tokenmill.models.decoder import LayerParts
from tokenmill.models.gemma2 import (
    GemmaDecoder,
    SandwichLayer,
    optional_number,
    query_scale,
    refuse_bidirectional,
)


class Gemma3ForCausalLM(GemmaDecoder):
    """A Gemma 3 text model with its output head."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, Any]) -> DecoderConfig:
        refuse_bidirectional(hf_config)
        ropes = {kind: rope_of(hf_config, kind) for kind in (False, True)}
        return DecoderConfig.from_hf(
            hf_config,
            norm_weight_offset=1.0,
            windows=layer_windows(hf_config, "Gemma3"),
            ropes=tuple(ropes[kind] for kind in windowed_layers(hf_config, "Gemma3")),
        )

    @classmethod
    def make_layer(cls, parts: LayerParts, hf_config: Mapping[str, Any]) -> nn.Module:
        attention = parts.attention(
            scale=query_scale(hf_config),
            logits_soft_cap=optional_number(hf_config, "attn_logit_softcapping"),
            **parts.head_norms(),
        )
        return SandwichLayer(parts, attention, parts.gated_mlp())


def rope_of(hf_config: Mapping[str, Any], is_windowed: bool) -> RopeConfig:
    """The settings of layers with a window, or of those without."""
    kind = "sliding_attention" if is_windowed else "full_attention"
    by_kind = hf_config.get("rope_parameters")
    if isinstance(by_kind, Mapping) and isinstance(by_kind.get(kind), Mapping):
        own: dict[str, Any] = {"rope_parameters": by_kind[kind], "rope_scaling": None}
    elif is_windowed:
        own = {
            "rope_parameters": None,
            "rope_scaling": None,
            "rope_theta": hf_config.get("rope_local_base_freq", 10_000.0),
        }
    elif by_kind is None:
        own = {"rope_theta": hf_config.get("rope_theta", 1_000_000.0)}
    else:
        raise ConfigError(f"config.json: rope_parameters has no settings for {kind!r} layers.")
    return RopeConfig.from_hf({**hf_config, **own})
