"""Mixtral: Mistral with a mixture of experts in place of each gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tokenmill.config.parameters import positive_int
from tokenmill.errors import ConfigError
from tokenmill.layers.moe import SparseMoE
from tokenmill.models.decoder import Decoder, LayerParts, PreNormLayer


class MixtralForCausalLM(Decoder):
    """A Mixtral with its output head."""

    @classmethod
    def make_layer(cls, parts: LayerParts, hf_config: Mapping[str, Any]) -> nn.Module:
        config = parts.config
        moe = SparseMoE(
            config.hidden_size,
            config.intermediate_size,
            **expert_counts(hf_config),
            renormalize=True,
            dtype=parts.dtype,
            kernels=parts.kernels,
            gate=config.gate,
            names=("w1", "w3", "w2"),
        )
        return PreNormLayer(parts, parts.attention(), moe, "block_sparse_moe")


def expert_counts(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """`num_experts` and `num_experts_per_tok`, as arguments of `SparseMoE`."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    key = next((name for name in names if hf_config.get(name) is not None), names[0])
    counts = {
        "num_experts": positive_int(hf_config, key),
        "num_experts_per_tok": positive_int(hf_config, "num_experts_per_tok"),
    }
    if counts["num_experts_per_tok"] > counts["num_experts"]:
        raise ConfigError(
            f"config.json: num_experts_per_tok={counts['num_experts_per_tok']} is more than"
            f" {key}={counts['num_experts']}."
        )
    return counts
