"""Qwen3-MoE: Qwen3 with a mixture of experts in some layers, mostly in all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tokenmill.checkpoint.expert_layout import EXPERT_LAYOUT, SEPARATE
from tokenmill.config.parameters import positive_int
from tokenmill.layers.moe import SparseMoE
from tokenmill.models.config import DecoderConfig
from tokenmill.models.decoder import Decoder, LayerParts, PreNormLayer
from tokenmill.models.mixtral import expert_counts
from tokenmill.models.qwen2 import qwen_config


class Qwen3MoeForCausalLM(Decoder):
    """A Qwen3-MoE with its output head."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, Any]) -> DecoderConfig:
        return qwen_config(hf_config)

    @classmethod
    def make_layer(cls, parts: LayerParts, hf_config: Mapping[str, Any]) -> nn.Module:
        attention = parts.attention(**parts.head_norms())
        if not has_experts(hf_config, parts.index):
            return PreNormLayer(parts, attention, parts.gated_mlp())
        moe = SparseMoE(
            parts.config.hidden_size,
            positive_int(hf_config, "moe_intermediate_size"),
            **expert_counts(hf_config),
            renormalize=bool(hf_config.get("norm_topk_prob", False)),
            dtype=parts.dtype,
            kernels=parts.kernels,
            gate=parts.config.gate,
            layout=hf_config.get(EXPERT_LAYOUT, SEPARATE),
        )
        return PreNormLayer(parts, attention, moe)


def has_experts(hf_config: Mapping[str, Any], layer: int) -> bool:
    """Every `decoder_sparse_step`-th layer has, unless `mlp_only_layers` names it."""
    step = positive_int(hf_config, "decoder_sparse_step", 1)
    return (layer + 1) % step == 0 and layer not in (hf_config.get("mlp_only_layers") or ())
