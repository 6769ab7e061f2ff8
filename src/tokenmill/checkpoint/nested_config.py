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

from tokenmill.checkpoint.expert_layout import EXPERT_LAYOUT, FUSED_TRANSPOSED
from tokenmill.errors import CheckpointError

T = TypeVar("T")

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
}
_QWEN2 = _LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
}
_QWEN2_VL = _QWEN2 | {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "eos_token_id": 151645,
}
_QWEN3_VL = _QWEN2 | {
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rope_theta": 500_000.0,
}
_QWEN3_VL_MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
    "eos_token_id": None,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    EXPERT_LAYOUT: FUSED_TRANSPOSED,
}
_TEXT_DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "mistral": (
        "MistralForCausalLM",
        _LLAMA
        | {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", _QWEN2),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_text"), ("Qwen3ForCausalLM", _QWEN3_VL)),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), ("Qwen3MoeForCausalLM", _QWEN3_VL_MOE)),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 1,
        },
    ),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        ("Qwen2ForCausalLM", _QWEN2_VL),
    ),
}
"""`model_type` of a `text_config` -> the decoder's own architecture, and what a file leaves out."""

_CLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_SIGLIP = _CLIP | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_IDEFICS3 = _SIGLIP | {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_QWEN2_TOWER = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2_5_TOWER = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN3_TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_PIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
}
_VISION_DEFAULTS: dict[str, dict[str, Any]] = {
    "clip_vision_model": _CLIP,
    "siglip_vision_model": _SIGLIP,
    "idefics3": _IDEFICS3,
    "idefics3_vision": _IDEFICS3,
    "smolvlm_vision": _IDEFICS3,
    "pixtral": _PIXTRAL,
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_vision"), _QWEN2_TOWER),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_vision"), _QWEN2_5_TOWER),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_vision"), _QWEN3_TOWER),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_vision"), _QWEN3_TOWER),
}
"""`model_type` of a `vision_config` -> what a file leaves out."""

_DEFAULT_KINDS = {
    "Gemma3ForConditionalGeneration": ("gemma3_text", "siglip_vision_model"),
    "LlavaForConditionalGeneration": ("llama", "clip_vision_model"),
    "LlavaNextForConditionalGeneration": ("llama", "clip_vision_model"),
    "LlavaOnevisionForConditionalGeneration": ("qwen2", "siglip_vision_model"),
    "Idefics3ForConditionalGeneration": ("llama", "idefics3_vision"),
    "SmolVLMForConditionalGeneration": ("llama", "smolvlm_vision"),
    "Mistral3ForConditionalGeneration": ("mistral", "pixtral"),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text", "qwen2_vl_vision"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_text", "qwen2_5_vl_vision"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text", "qwen3_vl_vision"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe_text", "qwen3_vl_moe_vision"),
}
"""`model_type` of both parts, where they do not say."""
VISION_ARCHITECTURES = frozenset(_DEFAULT_KINDS)

_LLAVA_TOWER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""What the family has instead of CLIP's defaults, where there is no `vision_config`."""
_ONEVISION_TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
_TOWERS_LEFT_OUT: dict[str, dict[str, Any]] = {
    "LlavaForConditionalGeneration": _LLAVA_TOWER,
    "LlavaNextForConditionalGeneration": _LLAVA_TOWER,
    "LlavaOnevisionForConditionalGeneration": _ONEVISION_TOWER,
}
_TOP_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlavaNextForConditionalGeneration": {
        "image_token_index": 32000,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    },
    "LlavaOnevisionForConditionalGeneration": {
        "image_token_index": 151646,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_9",
        "image_grid_pinpoints": [
            [384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)
        ],
    },
}
"""What files leave out beside both parts."""

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


_TOWERS = (
    "vision_tower.",
    "vision_model.",
    "visual.",
    "multi_modal_projector.",
    "connector.",
    "image_newline",
)


def is_of_tower(name: str) -> bool:
    """Whether a tensor or a module, by the names of this file, is no part of the decoder: it keeps
    its format where weights are quantised, and adapters do not change it.
    """
    return name.startswith(_TOWERS)


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
    text_kind, vision_kind = _DEFAULT_KINDS[architecture]
    text, vision = _part(config, "text_config"), _part(config, "vision_config")
    vision = vision or _TOWERS_LEFT_OUT.get(architecture, {})
    left_out = _TOP_DEFAULTS.get(architecture, {})
    config = {**config, **{key: left_out[key] for key in left_out if config.get(key) is None}}
    text_kind = str(text.get("model_type") or text_kind)
    decoder, defaults = _known(text_kind, _TEXT_DEFAULTS, "text_config")
    top = {key: value for key, value in config.items() if key != "text_config"}
    said = {key: value for key, value in text.items() if value is not None or key not in top}
    flat = {**defaults, **top, **said, "model_type": text_kind}
    flat["architectures"] = list(config["architectures"])
    flat[DECODER_ARCHITECTURE] = decoder
    tied = [part["tie_word_embeddings"] for part in (config, text) if "tie_word_embeddings" in part]
    if tied:
        flat["tie_word_embeddings"] = any(tied)
    vision_kind = str(vision.get("model_type") or vision_kind)
    tower_defaults = _known(vision_kind, _VISION_DEFAULTS, "vision_config")
    flat["vision_config"] = {**tower_defaults, **vision, "model_type": vision_kind}
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


def _known(kind: str, table: Mapping[str, Any], key: str) -> Any:
    if kind not in table:
        raise CheckpointError(
            f"config.json: {key} has model_type={kind!r:.80}, which is not supported beside a"
            f" vision tower; these are: {', '.join(table)}."
        )
    return table[kind]
