"""Models with a vision tower beside their decoder: one set of names, for configs and for tensors.

Their config.json has a decoder's parameters in `text_config` and the tower's in `vision_config`,
and leaves out what the library that wrote it has as default. Here the decoder's move to the top,
where everybody looks for a model's parameters, and both are completed.

Their tensors have had several names. Here the decoder's are those of a model without a tower:

    model.*  lm_head.*                            the decoder
    vision_tower.*  vision_model.*  visual.*      towers, as the family calls its own
    multi_modal_projector.*  connector.*          what brings the tower's values to the decoder
    image_newline                                 an embedding beside them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tokenmill.checkpoint.nested_defaults import (
    DEFAULT_KINDS,
    TEXT_DEFAULTS,
    TOP_DEFAULTS,
    TOWERS_LEFT_OUT,
    VISION_DEFAULTS,
)
from tokenmill.errors import CheckpointError

T = TypeVar("T")

VISION_ARCHITECTURES = frozenset(DEFAULT_KINDS)
DECODER_ARCHITECTURE = "decoder_architecture"
"""Key of the decoder's own architecture, such as `LlamaForCausalLM`, in a config made here."""

_RENAMED = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
    ("model.vision_tower.vision_model.", "vision_tower."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.image_newline", "image_newline"),
    ("model.vision_model.", "vision_model."),
    ("model.connector.", "connector."),
    ("model.visual.", "visual."),
)
"""Beginnings of names, and what they become; the first that fits."""


TOWERS = (
    "vision_tower.",
    "vision_model.",
    "visual.",
    "multi_modal_projector.",
    "connector.",
    "image_newline",
)
"""Beginnings of the names of what is no part of the decoder."""


def is_of_tower(name: str) -> bool:
    """Whether a tensor or a module, by the names of this file, is no part of the decoder: it keeps
    its format where weights are quantised, and adapters do not change it.
    """
    return name.startswith(TOWERS)


def has_vision_tower(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model of this file: one that takes images."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and bool(
        architectures and architectures[0] in VISION_ARCHITECTURES
    )


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the decoder's parameters at the top and a complete `vision_config`.

    To be called once, with what is in the file; others stay as they are. Raises `CheckpointError`
    for a part that is no object or of a kind that is not known.
    """
    if not has_vision_tower(config):
        return dict(config)
    architecture = config["architectures"][0]
    text_kind, vision_kind = DEFAULT_KINDS[architecture]
    text, vision = _part(config, "text_config"), _part(config, "vision_config")
    vision = vision or TOWERS_LEFT_OUT.get(architecture, {})
    left_out = TOP_DEFAULTS.get(architecture, {})
    config = {**config, **{key: left_out[key] for key in left_out if config.get(key) is None}}
    text_kind = str(text.get("model_type") or text_kind)
    decoder, defaults = _known(text_kind, TEXT_DEFAULTS, "text_config")
    top = {key: value for key, value in config.items() if key != "text_config"}
    said = {key: value for key, value in text.items() if value is not None or key not in top}
    flat = {**defaults, **top, **said, "model_type": text_kind}
    flat["architectures"] = list(config["architectures"])
    flat[DECODER_ARCHITECTURE] = decoder
    tied = [part["tie_word_embeddings"] for part in (config, text) if "tie_word_embeddings" in part]
    if tied:
        flat["tie_word_embeddings"] = any(tied)
    vision_kind = str(vision.get("model_type") or vision_kind)
    tower_defaults = _known(vision_kind, VISION_DEFAULTS, "vision_config")
    flat["vision_config"] = {**tower_defaults, **_squares(vision), "model_type": vision_kind}
    if "image_token_index" in config:
        flat.setdefault("image_token_id", config["image_token_index"])
    if architecture.startswith("Qwen"):
        flat.update(_rope_of_three(flat, interleaves=architecture.startswith("Qwen3")))
    return flat


def with_overridden_parts(
    config: Mapping[str, Any], overridden: Mapping[str, Any]
) -> dict[str, Any]:
    """`overridden`, made of `flat_config`'s `config` by laying keys over it, where those of a
    `text_config` and of a `vision_config` are laid over the part.
    """
    merged = dict(overridden)
    if DECODER_ARCHITECTURE not in config:
        return merged
    merged.update(_part(merged, "text_config"))
    merged.pop("text_config", None)
    merged["vision_config"] = {**config["vision_config"], **_part(merged, "vision_config")}
    return merged


def _rope_of_three(flat: Mapping[str, Any], *, interleaves: bool) -> dict[str, Any]:
    """RoPE settings of a decoder whose tokens have three positions: older files call its type
    `mrope`, and how its frequencies are split is a default.
    """
    key = "rope_scaling" if flat.get("rope_scaling") else "rope_parameters"
    split = [24, 20, 20] if interleaves else [16, 24, 24]
    settings = {"mrope_section": split, **(flat.get(key) or {}), "mrope_interleaved": interleaves}
    renamed = {
        name: "default" if name in ("type", "rope_type") and value == "mrope" else value
        for name, value in settings.items()
    }
    return {key: renamed}


def canonical_tensors(config: Mapping[str, Any], tensors: Mapping[str, T]) -> dict[str, T]:
    """`tensors` by the names of this file, where `config` is one of its models."""
    if not has_vision_tower(config):
        return dict(tensors)
    return {canonical_name(name): tensor for name, tensor in tensors.items()}


def canonical_name(name: str) -> str:
    """The name of a tensor as this file has it; such a name stays as it is."""
    for old, new in _RENAMED:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = config.get(key) or {}
    if not isinstance(part, Mapping):
        raise CheckpointError(f"config.json: {key} is {part!r:.80}, but must be an object.")
    return part


def _squares(vision: Mapping[str, Any]) -> dict[str, Any]:
    """Height and width of a square as one number."""
    return {
        key: value[0]
        if key in ("image_size", "patch_size")
        and isinstance(value, list | tuple)
        and len(value) == 2
        and value[0] == value[1]
        else value
        for key, value in vision.items()
    }


def _known(kind: str, table: Mapping[str, Any], key: str) -> Any:
    if kind not in table:
        raise CheckpointError(
            f"config.json: {key} has model_type={kind!r:.80}, which is not supported beside a"
            f" vision tower; these are: {', '.join(table)}."
        )
    return table[kind]
