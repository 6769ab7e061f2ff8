"""Gemma 2: norms before and behind each block, windows in every second layer, capped logits.

    x * sqrt(hidden_size) -> norm -> attention -> norm -> + -> norm -> gated MLP -> norm -> +

Norms multiply with 1 + weight. Scores of attention and logits of the head are capped:
cap * tanh(logits / cap).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tokenmill.config.parameters import number
from tokenmill.config.windows import layer_windows
from tokenmill.errors import ConfigError
from tokenmill.kernels.activation import soft_cap
from tokenmill.layers.mlp import GatedMLP
from tokenmill.layers.self_attention import SelfAttention
from tokenmill.models.config import DecoderConfig
from tokenmill.models.decoder import Decoder, LayerParts


class SandwichLayer(nn.Module):
    """Attention, then MLP, each between two norms; the second norm's result is added."""

    def __init__(self, parts: LayerParts, self_attn: SelfAttention, mlp: GatedMLP) -> None:
        super().__init__()
        hidden_size = parts.config.hidden_size
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = parts.stream_norm(self_attn)
        self.post_attention_layernorm = parts.branch_norm(hidden_size)
        self.pre_feedforward_layernorm = parts.stream_norm(mlp)
        self.post_feedforward_layernorm = parts.branch_norm(hidden_size)

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_layernorm(x, residual)
        x = self.post_attention_layernorm(self.self_attn(positions, normed))
        normed, residual = self.pre_feedforward_layernorm(x, residual)
        return self.post_feedforward_layernorm(self.mlp(normed)), residual


class GemmaDecoder(Decoder):
    """What Gemma 2 and 3 share around their layers."""

    config_defaults = {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "sliding_window": 4096,
    }

    def __init__(
        self, hf_config: Mapping[str, Any], *, dtype: torch.dtype, **settings: Any
    ) -> None:
        super().__init__(hf_config, dtype=dtype, **settings)
        merged = {**self.config_defaults, **hf_config}
        # Rounded as in training.
        self.embedding_scale = float(torch.tensor(merged["hidden_size"] ** 0.5).to(dtype))
        self.final_soft_cap = optional_number(merged, "final_logit_softcapping")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed_input_ids(input_ids) * self.embedding_scale

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden_states)
        return logits if self.final_soft_cap is None else soft_cap(logits, self.final_soft_cap)


class Gemma2ForCausalLM(GemmaDecoder):
    """A Gemma 2 with its output head."""

    config_defaults = {
        **GemmaDecoder.config_defaults,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }

    @classmethod
    def read_config(cls, hf_config: Mapping[str, Any]) -> DecoderConfig:
        refuse_bidirectional(hf_config)
        return DecoderConfig.from_hf(
            hf_config,
            norm_weight_offset=1.0,
            windows=layer_windows(hf_config, "Gemma2"),
        )

    @classmethod
    def make_layer(cls, parts: LayerParts, hf_config: Mapping[str, Any]) -> nn.Module:
        attention = parts.attention(
            scale=query_scale(hf_config),
            logits_soft_cap=optional_number(hf_config, "attn_logit_softcapping"),
        )
        return SandwichLayer(parts, attention, parts.gated_mlp())


def optional_number(hf_config: Mapping[str, Any], key: str) -> float | None:
    """`hf_config[key]`, which must be above 0; None where it is null."""
    if hf_config.get(key) is None:
        return None
    value = number(hf_config, key)
    if value <= 0:
        raise ConfigError(f"config.json: {key} is {value}, but must be above 0, or null.")
    return value


def query_scale(hf_config: Mapping[str, Any]) -> float:
    """What scores are multiplied by."""
    scalar = optional_number({"query_pre_attn_scalar": 256, **hf_config}, "query_pre_attn_scalar")
    assert scalar is not None
    return float(scalar**-0.5)


def refuse_bidirectional(hf_config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an encoder."""
    if hf_config.get("use_bidirectional_attention"):
        raise ConfigError(
            "config.json: use_bidirectional_attention=true is not supported here: the model would"
            " see tokens that are not written yet. Set it to false with hf_overrides if the file is"
            " wrong."
        )
