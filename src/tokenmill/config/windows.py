"""Which layers of a model see a window of its tokens, from its config.json.

The ledger asks before a model is built, and families ask when they are. A family that has rules of
its own for layers that `layer_types` does not name has a line in `_RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.checkpoint.nested_config import DECODER_ARCHITECTURE
from tokenmill.config.parameters import number, positive_int, standard_names
from tokenmill.errors import ConfigError, shown

_WINDOWED = {"full_attention": False, "sliding_attention": True}
"""What `layer_types` may say of a layer."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """Of a family."""

    is_windowed: Callable[[Mapping[str, Any], int], bool]
    """By config and layer, where there are no `layer_types`."""
    window: int | None = None
    """Of a config without `sliding_window`."""
    has_switch: bool = False
    """Whether windows are off unless `use_sliding_window` is set."""


def has_rope(hf_config: Mapping[str, Any], layer: int) -> bool:
    """Of SmolLM3: as `no_rope_layers` says (1 has it), or else by `no_rope_layer_interval`."""
    listed = hf_config.get("no_rope_layers")
    if listed is None:
        return (layer + 1) % positive_int(hf_config, "no_rope_layer_interval", 4) != 0
    if not isinstance(listed, list) or layer >= len(listed):
        raise ConfigError(
            f"config.json: no_rope_layers is {shown(listed)}, but must be a list of 0 and 1 with"
            f" one for each layer."
        )
    return bool(listed[layer])


def _is_even(hf_config: Mapping[str, Any], layer: int) -> bool:
    return layer % 2 == 0


def _is_between_periods(hf_config: Mapping[str, Any], layer: int) -> bool:
    return (layer + 1) % positive_int(hf_config, "sliding_window_pattern", 6) != 0


def _is_above_first(hf_config: Mapping[str, Any], layer: int) -> bool:
    return layer >= number(hf_config, "max_window_layers", 28)


_RULES = {
    "Gemma2": _Rule(_is_even, window=4096),
    "Gemma3": _Rule(_is_between_periods, window=4096),
    "GptOss": _Rule(_is_even, window=128),
    "Qwen": _Rule(_is_above_first, has_switch=True),
    "SmolLM3": _Rule(lambda config, layer: not has_rope(config, layer), has_switch=True),
}
"""What an architecture's name begins with, and the family's rule."""
_EVERY_LAYER = _Rule(lambda config, layer: True)


def layer_windows(
    hf_config: Mapping[str, Any], architecture: str | None = None
) -> tuple[int | None, ...]:
    """Each layer's window in tokens, the query's own included; None sees everything.

    `architecture` is the config's own by default. Raises `ConfigError` that names the key at fault.
    """
    rule = _rule_of(hf_config, architecture)
    window = hf_config.get("sliding_window", rule.window)
    if window is None or (rule.has_switch and not hf_config.get("use_sliding_window")):
        return (None,) * _num_layers(hf_config)
    window = positive_int({"sliding_window": window}, "sliding_window")
    windowed = windowed_layers(hf_config, architecture)
    return tuple(window if each else None for each in windowed)


def windowed_layers(
    hf_config: Mapping[str, Any], architecture: str | None = None
) -> tuple[bool, ...]:
    """Which layers are of the kind that has a window: as `layer_types` says, or the family's rule.

    Raises `ConfigError` that names the key at fault.
    """
    num_layers = _num_layers(hf_config)
    types = hf_config.get("layer_types")
    if types is None:
        rule = _rule_of(hf_config, architecture)
        return tuple(rule.is_windowed(hf_config, layer) for layer in range(num_layers))
    if not isinstance(types, list) or len(types) < num_layers or not set(types) <= set(_WINDOWED):
        raise ConfigError(
            f"config.json: layer_types is {shown(types)}, but must be a list of at least"
            f" {num_layers} of {', '.join(_WINDOWED)}, one for each layer."
        )
    return tuple(_WINDOWED[each] for each in types[:num_layers])


def _num_layers(hf_config: Mapping[str, Any]) -> int:
    return positive_int(standard_names(hf_config), "num_hidden_layers")


def _rule_of(hf_config: Mapping[str, Any], architecture: str | None) -> _Rule:
    if architecture is None:
        whole = (hf_config.get("architectures") or [""])[0]
        architecture = str(hf_config.get(DECODER_ARCHITECTURE, whole))
    return next(
        (rule for start, rule in _RULES.items() if architecture.startswith(start)), _EVERY_LAYER
    )
