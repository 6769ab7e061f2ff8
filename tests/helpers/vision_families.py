"""The families that take images, each with a small config: what the tests of images run over, and
what `docs/models.md` lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCAB_SIZE = 420

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Heads of 64 values, so that the native kernels serve them."""

_TOWER: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 30,
    "patch_size": 7,
    "initializer_range": 0.15,
}
_INTERNVL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": [28, 28],
    "patch_size": [7, 7],
}
_TILES_OF_INTERNVL = {"crop_to_patches": True, "min_patches": 1, "max_patches": 6}
_GRIDS = [[30, 60], [60, 30], [60, 60], [30, 90]]
"""Resolutions of tiles."""


@dataclass(frozen=True)
class VisionFamily:
    """One architecture, and how it is tested."""

    name: str
    models: str
    """What people call the models."""
    architecture: str
    """As `architectures` of a config.json names it."""
    config_class: str
    """Of transformers."""
    tower: Mapping[str, Any]
    """The `vision_config`; `model_type` included."""
    decoder: Mapping[str, Any]
    """The `text_config` beyond `TEXT`."""
    more: Mapping[str, Any]
    """What the config has beside both, `IMAGE_TOKEN` for its token of images."""
    processor: str
    """Module and class of transformers' image processor on numpy and pillow."""
    preprocessor: Mapping[str, Any]
    """Its settings."""
    special_tokens: tuple[str, ...]
    """Beyond those of the tiny tokenizer; the first is the image's, or `mark` is."""
    images: str
    """What an image becomes, in the words of the page."""
    decoders: str
    """Families that may stand beside the tower."""
    not_supported: str = ""
    mark: str = ""
    """What stands for an image in a prompt, where it is not the image's token."""
    is_like_others: bool = False
    """Whether steps with its images are as another family's: what is tested of these is tested of
    this one where time does not matter."""
    aliases: tuple[str, ...] = field(default=())
    """Other architectures that are the same."""


IMAGE_TOKEN = "image token"
"""Stands in `more` for the id that the vocabulary gives to the image's token."""

VISION_FAMILIES = [
    VisionFamily(
        name="llava",
        models="LLaVA 1.5, and others with its architecture",
        architecture="LlavaForConditionalGeneration",
        config_class="LlavaConfig",
        tower={**_TOWER, "model_type": "clip_vision_model"},
        decoder={"model_type": "llama"},
        more={"image_token_index": IMAGE_TOKEN},
        processor="clip.image_processing_pil_clip:CLIPImageProcessorPil",
        preprocessor={
            "size": {"shortest_edge": 30},
            "crop_size": {"height": 30, "width": 30},
        },
        special_tokens=("<image>",),
        images="a square of the tower's size (CLIP: cut from the middle; SigLIP: squeezed)",
        decoders="Llama, Mistral, Qwen2",
        not_supported="video",
    ),
    VisionFamily(
        name="llava-siglip",
        models="",
        architecture="LlavaForConditionalGeneration",
        config_class="LlavaConfig",
        tower={**_TOWER, "model_type": "siglip_vision_model"},
        decoder={
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 21,
            "max_window_layers": 1,
        },
        more={
            "image_token_index": IMAGE_TOKEN,
            "vision_feature_layer": [-2, 1, -1],
            "vision_feature_select_strategy": "full",
            "multimodal_projector_bias": False,
            "projector_hidden_act": "silu",
        },
        processor="siglip.image_processing_pil_siglip:SiglipImageProcessorPil",
        preprocessor={"size": {"height": 30, "width": 30}},
        special_tokens=("<image>",),
        images="",
        decoders="",
    ),
    VisionFamily(
        name="pixtral",
        models="Pixtral 12B (in the format of transformers)",
        architecture="LlavaForConditionalGeneration",
        config_class="LlavaConfig",
        tower={
            "hidden_size": 48,
            "intermediate_size": 56,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 40,
            "patch_size": 7,
            "model_type": "pixtral",
            "hidden_act": "silu",
        },
        decoder={"model_type": "mistral", "head_dim": 64, "sliding_window": None},
        more={
            "image_token_index": IMAGE_TOKEN,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        processor="pixtral.image_processing_pil_pixtral:PixtralImageProcessorPil",
        preprocessor={
            "size": {"longest_edge": 40},
            "patch_size": {"height": 7, "width": 7},
        },
        special_tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        images="their shape, up to the model's bound; one token for a patch, and one for a row",
        decoders="Mistral",
    ),
    VisionFamily(
        name="llava-next",
        models="LLaVA-NeXT (1.6)",
        architecture="LlavaNextForConditionalGeneration",
        config_class="LlavaNextConfig",
        tower={**_TOWER, "model_type": "clip_vision_model"},
        decoder={"model_type": "mistral", "head_dim": 64, "sliding_window": None},
        more={"image_token_index": IMAGE_TOKEN, "image_grid_pinpoints": _GRIDS},
        processor="llava_next.image_processing_pil_llava_next:LlavaNextImageProcessorPil",
        preprocessor={
            "size": {"shortest_edge": 30},
            "crop_size": {"height": 30, "width": 30},
            "image_grid_pinpoints": _GRIDS,
        },
        special_tokens=("<image>",),
        images="the whole image in a tile, and tiles of it in one of the model's resolutions, with"
        " a token at each row's end",
        decoders="Llama, Mistral, Qwen2",
        is_like_others=True,
    ),
    VisionFamily(
        name="llava-onevision",
        models="LLaVA-OneVision",
        architecture="LlavaOnevisionForConditionalGeneration",
        config_class="LlavaOnevisionConfig",
        tower={**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        decoder={"model_type": "qwen2"},
        more={
            "image_token_index": IMAGE_TOKEN,
            "image_grid_pinpoints": _GRIDS,
            "vision_aspect_ratio": "anyres_max_2",
        },
        processor="llava_onevision.image_processing_pil_llava_onevision"
        ":LlavaOnevisionImageProcessorPil",
        preprocessor={"size": {"height": 30, "width": 30}, "image_grid_pinpoints": _GRIDS},
        special_tokens=("<image>",),
        images="as LLaVA-NeXT, scaled down where tokens are too many; each as if it was alone",
        decoders="Qwen2, Llama",
        not_supported="video",
        is_like_others=True,
    ),
    VisionFamily(
        name="mistral3",
        models="Mistral Small 3.1 and 3.2 (in the format of transformers)",
        architecture="Mistral3ForConditionalGeneration",
        config_class="Mistral3Config",
        tower={
            "hidden_size": 48,
            "intermediate_size": 56,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 40,
            "patch_size": 7,
            "model_type": "pixtral",
            "hidden_act": "gelu",
        },
        decoder={"model_type": "mistral", "head_dim": 64, "sliding_window": 19},
        more={
            "image_token_index": IMAGE_TOKEN,
            "vision_feature_layer": -2,
            "tie_word_embeddings": False,
        },
        processor="pixtral.image_processing_pil_pixtral:PixtralImageProcessorPil",
        preprocessor={
            "size": {"longest_edge": 40},
            "patch_size": {"height": 14, "width": 14},
        },
        special_tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        images="as Pixtral, with one token for 2 x 2 patches",
        decoders="Mistral",
    ),
    VisionFamily(
        name="internvl",
        models="InternVL 3 and 3.5 (in the format of transformers, without experts)",
        architecture="InternVLForConditionalGeneration",
        config_class="InternVLConfig",
        tower={**_INTERNVL, "attention_bias": True},
        decoder={"model_type": "qwen2"},
        more={"image_token_id": IMAGE_TOKEN, "tie_word_embeddings": False},
        processor="got_ocr2.image_processing_pil_got_ocr2:GotOcr2ImageProcessorPil",
        preprocessor={"size": {"height": 28, "width": 28}, **_TILES_OF_INTERNVL},
        special_tokens=("<IMG_CONTEXT>", "<img>", "</img>"),
        images="tiles in the grid that is nearest to its shape, and the whole image; one token for"
        " 2 x 2 patches",
        decoders="Qwen2, Qwen3, Llama",
        not_supported="video, experts",
        is_like_others=True,
    ),
    VisionFamily(
        name="internvl-rms",
        models="",
        architecture="InternVLForConditionalGeneration",
        config_class="InternVLConfig",
        tower={
            **_INTERNVL,
            "norm_type": "rms_norm",
            "use_qk_norm": True,
            "use_mean_pooling": False,
        },
        decoder={"model_type": "qwen3", "head_dim": 64},
        more={"image_token_id": IMAGE_TOKEN, "tie_word_embeddings": True},
        processor="got_ocr2.image_processing_pil_got_ocr2:GotOcr2ImageProcessorPil",
        preprocessor={"size": {"height": 28, "width": 28}, **_TILES_OF_INTERNVL},
        special_tokens=("<IMG_CONTEXT>", "<img>", "</img>"),
        images="",
        decoders="",
        is_like_others=True,
    ),
    VisionFamily(
        name="smolvlm",
        models="SmolVLM, SmolVLM2 (images)",
        architecture="SmolVLMForConditionalGeneration",
        config_class="SmolVLMConfig",
        tower={**_TOWER, "image_size": 28},
        decoder={"model_type": "llama"},
        more={"image_token_id": IMAGE_TOKEN, "scale_factor": 2},
        processor="smolvlm.image_processing_pil_smolvlm:SmolVLMImageProcessorPil",
        preprocessor={
            "size": {"longest_edge": 56},
            "max_image_size": {"longest_edge": 28},
        },
        special_tokens=(
            "<image>",
            "<fake_token_around_image>",
            "<global-img>",
            *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
        ),
        images="tiles beside the whole image, as many as its size and shape ask for",
        decoders="Llama (SmolLM2)",
        not_supported="video",
    ),
    VisionFamily(
        name="idefics3",
        models="Idefics3 8B",
        architecture="Idefics3ForConditionalGeneration",
        config_class="Idefics3Config",
        # A tower whose positions are not those of tiles, and a vocabulary that spells their marks.
        tower={**_TOWER, "image_size": 42},
        decoder={"model_type": "llama", "tie_word_embeddings": True},
        more={"image_token_id": IMAGE_TOKEN, "scale_factor": 2, "tie_word_embeddings": True},
        processor="idefics3.image_processing_pil_idefics3:Idefics3ImageProcessorPil",
        preprocessor={
            "size": {"longest_edge": 56},
            "max_image_size": {"longest_edge": 28},
        },
        special_tokens=("<image>", "<fake_token_around_image>"),
        images="as SmolVLM",
        decoders="Llama",
    ),
    VisionFamily(
        name="qwen2-vl",
        models="Qwen2-VL",
        architecture="Qwen2VLForConditionalGeneration",
        config_class="Qwen2VLConfig",
        tower={
            "depth": 3,
            "embed_dim": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "hidden_size": 128,
            "patch_size": 4,
        },
        decoder={
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [12, 10, 10],
            }
        },
        more={"image_token_id": IMAGE_TOKEN},
        processor="qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil",
        preprocessor={
            "patch_size": 4,
            "size": {"shortest_edge": 256, "longest_edge": 2048},
        },
        special_tokens=("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
        images="their shape, within bounds on pixels; one token for 2 x 2 patches",
        decoders="Qwen2, with positions in three dimensions",
        not_supported="video",
    ),
    VisionFamily(
        name="qwen2.5-vl",
        models="Qwen2.5-VL",
        architecture="Qwen2_5_VLForConditionalGeneration",
        config_class="Qwen2_5_VLConfig",
        tower={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 84,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": 4,
            "window_size": 24,
            "fullatt_block_indexes": [1],
        },
        decoder={
            "use_sliding_window": True,
            "sliding_window": 21,
            "max_window_layers": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [8, 12, 12],
            },
        },
        more={"image_token_id": IMAGE_TOKEN},
        processor="qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil",
        preprocessor={
            "patch_size": 4,
            "size": {"shortest_edge": 256, "longest_edge": 2048},
        },
        special_tokens=("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
        images="as Qwen2-VL",
        decoders="as Qwen2-VL",
        not_supported="video",
    ),
    VisionFamily(
        name="qwen3-vl",
        models="Qwen3-VL",
        architecture="Qwen3VLForConditionalGeneration",
        config_class="Qwen3VLConfig",
        tower={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 84,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": 4,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
        },
        decoder={
            "num_hidden_layers": 3,
            "head_dim": 64,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [12, 10, 10],
            },
        },
        more={"image_token_id": IMAGE_TOKEN},
        processor="qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil",
        preprocessor={
            "patch_size": 4,
            "size": {"shortest_edge": 256, "longest_edge": 2048},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        special_tokens=("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
        images="as Qwen2-VL, with embeddings for the first layers of the decoder, too",
        decoders="Qwen3, with positions in three dimensions",
        not_supported="video",
    ),
    VisionFamily(
        name="qwen3-vl-moe",
        models="Qwen3-VL with experts",
        architecture="Qwen3VLMoeForConditionalGeneration",
        config_class="Qwen3VLMoeConfig",
        tower={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 84,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": 4,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [1],
        },
        decoder={
            "head_dim": 64,
            "moe_intermediate_size": 96,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [12, 10, 10],
            },
        },
        more={"image_token_id": IMAGE_TOKEN},
        processor="qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil",
        preprocessor={
            "patch_size": 4,
            "size": {"shortest_edge": 256, "longest_edge": 2048},
        },
        special_tokens=("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
        images="as Qwen3-VL",
        decoders="Qwen3-MoE, with positions in three dimensions",
        not_supported="video",
        is_like_others=True,
    ),
    VisionFamily(
        name="gemma3",
        models="Gemma 3 (4B and larger)",
        architecture="Gemma3ForConditionalGeneration",
        config_class="Gemma3Config",
        tower={
            **_TOWER,
            "image_size": 42,
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
        },
        decoder={
            "model_type": "gemma3_text",
            "head_dim": 64,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 7,  # less than an image
            "tie_word_embeddings": False,  # a head that is the embedding repeats the last token
        },
        more={
            "image_token_index": IMAGE_TOKEN,
            "mm_tokens_per_image": 9,
            "tie_word_embeddings": False,
        },
        processor="gemma3.image_processing_pil_gemma3:Gemma3ImageProcessorPil",
        preprocessor={"size": {"height": 42, "width": 42}},
        special_tokens=("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        mark="<start_of_image>",
        images="a square of the tower's size; one token for each square of patches, which see each"
        " other in both directions",
        decoders="Gemma 3",
        not_supported="pan and scan",
    ),
]
"""In the order of the page; those without `models` are variants of the one above."""
