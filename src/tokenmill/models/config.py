"""What most families read from a config.json, under one set of names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.config.parameters import number, read_parameters
from tokenmill.config.windows import layer_windows
from tokenmill.errors import ConfigError
from tokenmill.kernels.activation import Gate
from tokenmill.layers.rope import RopeConfig

GATES: dict[str, Gate] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder with rotary positions, gated feed-forward blocks and RMSNorm."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    norm_eps: float
    norm_weight_offset: float = 0.0
    """Added to every norm's weight."""
    gate: Gate
    ropes: tuple[RopeConfig, ...]
    """By layer."""
    windows: tuple[int | None, ...]
    """By layer: tokens that a query sees, itself included; None sees all."""
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any], **different: Any) -> DecoderConfig:
        """Read it; `different` fields are as the family says.

        Raises `ConfigError` that names the key at fault.
        """
        sizes = read_parameters(hf_config)
        if sizes.num_heads % sizes.num_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads={sizes.num_heads} is not a multiple of"
                f" num_key_value_heads={sizes.num_kv_heads}."
            )
        fields = {
            "num_layers": sizes.num_layers,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_heads": sizes.num_heads,
            "num_kv_heads": sizes.num_kv_heads,
            "head_size": sizes.head_size,
            "vocab_size": sizes.vocab_size,
            "norm_eps": norm_eps(hf_config, "rms_norm_eps", 1e-6),
            "gate": activation_gate(hf_config),
            "attention_bias": bool(hf_config.get("attention_bias", False)),
            "mlp_bias": bool(hf_config.get("mlp_bias", False)),
            "tie_word_embeddings": bool(hf_config.get("tie_word_embeddings", False)),
            **different,
        }
        if "ropes" not in fields:
            fields["ropes"] = (RopeConfig.from_hf(hf_config),) * sizes.num_layers
        if "windows" not in fields:
            fields["windows"] = layer_windows(hf_config)
        return cls(**fields)


def norm_eps(hf_config: Mapping[str, Any], key: str, default: float) -> float:
    """`hf_config[key]`, which must be at least 0."""
    eps = number(hf_config, key, default)
    if eps < 0:
        raise ConfigError(f"config.json: {key} is {eps}, but must be at least 0.")
    return eps


def activation_gate(hf_config: Mapping[str, Any], default: str = "silu") -> Gate:
    """The activation of feed-forward blocks, by any of the keys that families have for it."""
    for key in ("hidden_activation", "activation_function", "hidden_act"):
        name = hf_config.get(key)
        if name is None:
            continue
        if name not in GATES:
            raise ConfigError(
                f"config.json: {key}={name!r} is not supported; these are: {', '.join(GATES)}."
            )
        return GATES[name]
    return GATES[default]
