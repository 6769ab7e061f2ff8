"""The few model parameters that the engine itself needs, read from a config.json."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.config.state_space import StateSizes
from tokenmill.errors import ConfigError, shown

_LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True)
class ModelParameters:
    """Sizes of a decoder."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_context: int
    """Tokens the model was made for, RoPE scaling included."""
    stores_values: bool = True
    """Whether the KV cache holds values; else they are parts of keys (latent attention)."""
    states: StateSizes | None = None
    """State-space layers, if there are any: they keep no KV."""

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep KV."""
        return self.num_layers - (0 if self.states is None else self.states.num_layers)


def read_parameters(config: Mapping[str, Any], *, caches_latents: bool = True) -> ModelParameters:
    """Read and check the sizes. Raises `ConfigError` that names the key at fault.

    Models with latent attention keep one latent for all heads, or else, unless `caches_latents`,
    the keys and values that are made of it.
    """
    config = standard_names(config)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ConfigError(
            "config.json has no `architectures`, so the model's family is unknown;"
            " add it with hf_overrides, such as {'architectures': ['LlamaForCausalLM']}."
        )
    states = read_state_sizes(config)
    if states is not None and states.num_layers == config.get("num_hidden_layers"):
        return _without_attention(config, states)
    num_heads = positive_int(config, "num_attention_heads")
    hidden_size = positive_int(config, "hidden_size")
    num_kv_heads = positive_int(config, "num_key_value_heads", num_heads)
    head_size = positive_int(config, "head_dim", hidden_size // num_heads)
    if config.get("kv_lora_rank") is not None:
        rotated = positive_int(config, "qk_rope_head_dim")
        num_kv_heads = 1 if caches_latents else num_heads
        kept = "kv_lora_rank" if caches_latents else "qk_nope_head_dim"
        head_size = positive_int(config, kept) + rotated
    return ModelParameters(
        architecture=str(architectures[0]),
        num_layers=positive_int(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=positive_int(config, "intermediate_size", 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=positive_int(config, "vocab_size"),
        max_context=_max_context(config),
        stores_values=config.get("kv_lora_rank") is None or not caches_latents,
        states=states,
    )


_UNBOUNDED_CONTEXT = 32_768
"""Of models that know no positions, if their config does not say: tables of tokens end here."""


def _without_attention(config: Mapping[str, Any], states: StateSizes) -> ModelParameters:
    """Of a model that consists of state-space layers; its heads are theirs."""
    return ModelParameters(
        architecture=str(config["architectures"][0]),
        num_layers=states.num_layers,
        hidden_size=positive_int(config, "hidden_size"),
        intermediate_size=states.num_heads * states.head_size,
        num_heads=states.num_heads,
        num_kv_heads=states.num_heads,
        head_size=states.head_size,
        vocab_size=positive_int(config, "vocab_size"),
        max_context=positive_int(config, "max_position_embeddings", _UNBOUNDED_CONTEXT),
        states=states,
    )


@dataclass(frozen=True, slots=True)
class _StateKeys:
    """What a family calls the sizes of its state-space layers, and what they are by default."""

    num_heads: str
    head_size: str
    state_size: str
    num_groups: str
    kernel_size: str
    expand: str
    default_state_size: int
    default_num_groups: int
    beside_attention: bool


_STATE_KEYS = {
    "Bamba": _StateKeys(
        num_heads="mamba_n_heads",
        head_size="mamba_d_head",
        state_size="mamba_d_state",
        num_groups="mamba_n_groups",
        kernel_size="mamba_d_conv",
        expand="mamba_expand",
        default_state_size=256,
        default_num_groups=1,
        beside_attention=True,
    ),
    "Mamba2": _StateKeys(
        num_heads="num_heads",
        head_size="head_dim",
        state_size="state_size",
        num_groups="n_groups",
        kernel_size="conv_kernel",
        expand="expand",
        default_state_size=128,
        default_num_groups=8,
        beside_attention=False,
    ),
}
"""By what the names of architectures with state-space layers begin with."""


def read_state_sizes(config: Mapping[str, Any]) -> StateSizes | None:
    """Of a model with Mamba-2 layers that we serve; None of any other.

    Raises `ConfigError` that names the key at fault.
    """
    architecture = str((config.get("architectures") or [""])[0])
    keys = next((_STATE_KEYS[name] for name in _STATE_KEYS if architecture.startswith(name)), None)
    if keys is None:
        return None
    hidden_size = positive_int(config, "hidden_size")
    num_heads = positive_int(config, keys.num_heads)
    inner = hidden_size * positive_int(config, keys.expand, 2)
    head_size = config.get(keys.head_size, "auto")
    head_size = inner // num_heads if head_size == "auto" else positive_int(config, keys.head_size)
    if num_heads * head_size != inner:
        raise ConfigError(
            f"config.json: {keys.num_heads}={num_heads} heads of {keys.head_size}={head_size}"
            f" values are not {keys.expand} * hidden_size, {inner}."
        )
    num_groups = positive_int(config, keys.num_groups, keys.default_num_groups)
    if num_heads % num_groups:
        raise ConfigError(
            f"config.json: {keys.num_heads}={num_heads} is not a multiple of"
            f" {keys.num_groups}={num_groups}."
        )
    num_others = len(attention_indices(config)) if keys.beside_attention else 0
    return StateSizes(
        num_layers=positive_int(config, "num_hidden_layers") - num_others,
        num_heads=num_heads,
        head_size=head_size,
        state_size=positive_int(config, keys.state_size, keys.default_state_size),
        num_groups=num_groups,
        kernel_size=positive_int(config, keys.kernel_size, 4),
    )


def attention_indices(config: Mapping[str, Any]) -> frozenset[int]:
    """The layers with attention. Raises `ConfigError` if there are none, or others than these."""
    given = config.get("attn_layer_indices")
    num_layers = positive_int(config, "num_hidden_layers")
    if (
        not isinstance(given, list)
        or not given
        or not all(isinstance(index, int) and 0 <= index < num_layers for index in given)
        or len(set(given)) == num_layers
    ):
        raise ConfigError(
            f"config.json: attn_layer_indices={shown(given)} must list some of the"
            f" {num_layers} layers, and not all."
        )
    return frozenset(given)


_STANDARD_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}
"""What GPT-2 calls its sizes."""


def standard_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the sizes under the names that most models have."""
    renamed = {new: config[old] for old, new in _STANDARD_NAMES.items() if old in config}
    return {**renamed, **config}


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """`config[key]`, which must be a positive integer; `default` where it is absent or null."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"config.json: {key} is {shown(value)}, but must be a positive integer."
            f" Set it with hf_overrides={{'{key}': ...}} if the file is wrong."
        )
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """`config[key]`, which must be a finite number; `default` where it is absent or null."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise ConfigError(
            f"config.json: {key} is {shown(value)}, but must be a finite number."
            f" Set it with hf_overrides if the file is wrong."
        )
    return float(value)


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE settings under one set of names, wherever a config.json keeps them.

    Older files have `rope_theta` and `rope_scaling` with `type` or `rope_type`, newer ones
    `rope_parameters`. The result always has `rope_type` and `rope_theta`.
    """
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"config.json: {key} is {shown(value)}, but must be an object or null."
            )
        merged.update(value)
    rope_type = merged.pop("type", None)
    merged.setdefault("rope_type", rope_type or "default")
    if not isinstance(merged["rope_type"], str):
        raise ConfigError(
            f"config.json: rope_type is {shown(merged['rope_type'])}, but must be a string."
        )
    merged.setdefault("rope_theta", config.get("rope_theta") or 10_000.0)
    return merged


_CONTEXT_INCLUDES_SCALING = {"default", "llama3", "longrope", "su", "proportional"}
"""RoPE types whose `max_position_embeddings` is the scaled length already."""


def _max_context(config: Mapping[str, Any]) -> int:
    length = positive_int(config, "max_position_embeddings")
    rope = rope_parameters(config)
    is_scaled = str(config.get("model_type")) == "gemma3_text"
    if is_scaled or rope["rope_type"] in _CONTEXT_INCLUDES_SCALING:
        return length
    factor = number(rope, "factor", 1.0)
    if factor < 1:
        raise ConfigError(f"config.json: RoPE factor is {factor!r}, but must be at least 1.")
    original = rope.get("original_max_position_embeddings")
    if rope["rope_type"] == "yarn" and isinstance(original, int):
        length = original
    return int(length * factor)
