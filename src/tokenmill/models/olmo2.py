"""OLMo 2: norms behind the blocks, and over all queries and all keys of a token.

    x -> attention -> norm -> + -> gated MLP -> norm -> +

The blocks read the residual stream as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tokenmill.layers.norm import ResidualAdd
from tokenmill.models.decoder import Decoder, LayerParts
from tokenmill.parallel.shares import even_share, kv_head_share


class Olmo2Layer(nn.Module):
    """Attention, then MLP, each normalised before it is added to the residual stream."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        config, group = parts.config, parts.kernels.group
        heads = even_share(config.num_heads, group.rank, group.size)
        kv_heads = kv_head_share(config.num_kv_heads, group.rank, group.size)
        self.self_attn = parts.attention(
            q_norm=parts.gathered_norm(heads.of(config.head_size)),
            k_norm=parts.gathered_norm(kv_heads.of(config.head_size)),
        )
        self.mlp = parts.gated_mlp()
        self.attention_input = ResidualAdd(parts.kernels, self.self_attn.empty_input)
        self.mlp_input = ResidualAdd(parts.kernels, self.mlp.empty_input)
        self.post_attention_layernorm = parts.branch_norm(config.hidden_size)
        self.post_feedforward_layernorm = parts.branch_norm(config.hidden_size)

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream, residual = self.attention_input(x, residual)
        x = self.post_attention_layernorm(self.self_attn(positions, stream))
        stream, residual = self.mlp_input(x, residual)
        return self.post_feedforward_layernorm(self.mlp(stream)), residual


class Olmo2ForCausalLM(Decoder):
    """An OLMo 2 with its output head."""

    @classmethod
    def make_layer(cls, parts: LayerParts, hf_config: Mapping[str, Any]) -> nn.Module:
        return Olmo2Layer(parts)
