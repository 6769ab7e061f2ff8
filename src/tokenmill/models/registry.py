"""Architecture name -> model class, imported when asked for; or the code of another library."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from tokenmill.checkpoint.nested_config import VISION_ARCHITECTURES
from tokenmill.config.argument_types import one_of
from tokenmill.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from tokenmill.models.base import CausalLMClass


MODELS: dict[str, str] = {
    "LlamaForCausalLM": "llama:LlamaForCausalLM",
    "MistralForCausalLM": "llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "qwen3:Qwen3ForCausalLM",
    "SmolLM3ForCausalLM": "smollm3:SmolLM3ForCausalLM",
    "Phi3ForCausalLM": "phi3:Phi3ForCausalLM",
    "Olmo2ForCausalLM": "olmo2:Olmo2ForCausalLM",
    "GPT2LMHeadModel": "gpt2:GPT2LMHeadModel",
    "Gemma2ForCausalLM": "gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "gemma3:Gemma3ForCausalLM",
    "MixtralForCausalLM": "mixtral:MixtralForCausalLM",
    "Qwen3MoeForCausalLM": "qwen3_moe:Qwen3MoeForCausalLM",
    "GptOssForCausalLM": "gpt_oss:GptOssForCausalLM",
    "DeepseekV2ForCausalLM": "deepseek:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "deepseek:DeepseekV3ForCausalLM",
    "BambaForCausalLM": "bamba:BambaForCausalLM",
    "Mamba2ForCausalLM": "mamba2:Mamba2ForCausalLM",
    "Gemma3ForConditionalGeneration": "gemma3_vision:Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration": "llava:LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration": "llava_next:LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration": "llava_next:LlavaNextForConditionalGeneration",
    "Idefics3ForConditionalGeneration": "idefics3:Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration": "idefics3:Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration": "internvl:InternVLForConditionalGeneration",
    "Mistral3ForConditionalGeneration": "mistral3:Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration": "qwen2_vl:Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_vl:Qwen2VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration": "qwen3_vl:Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl:Qwen3VLForConditionalGeneration",
    "BertModel": "bert:BertModel",
    "BertForSequenceClassification": "bert:BertForSequenceClassification",
    "RobertaModel": "bert:BertModel",
    "RobertaForSequenceClassification": "bert:RobertaForSequenceClassification",
    "XLMRobertaModel": "bert:BertModel",
    "XLMRobertaForSequenceClassification": "bert:RobertaForSequenceClassification",
}
"""Architecture, as a config.json names it -> module of this package, and class."""


NATIVE = "tokenmill"
TRANSFORMERS = "transformers"
IMPLEMENTATIONS = ("auto", NATIVE, TRANSFORMERS)
"""What `model_impl` may be."""
INSTALL_TRANSFORMERS = 'pip install "tokenmill[transformers]"'


def has_native_family(architecture: str) -> bool:
    """Whether there is a model of this package for an architecture."""
    return _with_head(architecture) in MODELS


def choose_implementation(model_impl: str, architecture: str) -> str:
    """Whose code a model runs on: `NATIVE`, or `TRANSFORMERS`, which is not imported for this.

    Raises `ConfigError` for another `model_impl`, and where the code is not there.
    """
    one_of("model_impl", model_impl, IMPLEMENTATIONS)
    if model_impl == TRANSFORMERS and architecture in VISION_ARCHITECTURES:
        raise ConfigError(
            f"model_impl='transformers' serves no models with a vision tower, and {architecture!r}"
            f" is one; leave it out."
        )
    if model_impl == NATIVE or (model_impl == "auto" and has_native_family(architecture)):
        _find(architecture)
        return NATIVE
    if importlib.util.find_spec("transformers") is None:
        if model_impl == "auto":
            raise ConfigError(
                f"Models of architecture {architecture!r} have no native family."
                f"{did_you_mean(architecture, MODELS)} Decoders run on the code that the"
                f" transformers library has for them: {INSTALL_TRANSFORMERS}."
            )
        raise ConfigError(
            f"model_impl='transformers' needs the transformers library: {INSTALL_TRANSFORMERS}."
        )
    return TRANSFORMERS


def get_model_class(architecture: str) -> CausalLMClass:
    """The class of an architecture.

    Raises `ConfigError` for one we do not have.
    """
    module, _, name = _find(architecture).partition(":")
    found: CausalLMClass = getattr(importlib.import_module(f"tokenmill.models.{module}"), name)
    return found


def _find(architecture: str) -> str:
    architecture = _with_head(architecture)
    if architecture not in MODELS:
        raise ConfigError(
            f"Models of architecture {architecture!r} are not supported."
            f"{did_you_mean(architecture, MODELS)} Supported: {', '.join(MODELS)}."
        )
    return MODELS[architecture]


def _with_head(architecture: str) -> str:
    """The decoder that one without a head for tokens is otherwise: `LlamaForCausalLM` of
    `LlamaModel` and of `LlamaForSequenceClassification`.
    """
    if architecture in MODELS:
        return architecture
    for ending in (
        "TextForSequenceClassification",
        "ForSequenceClassification",
        "TextModel",
        "Model",
    ):
        if architecture.endswith(ending):
            stem = architecture.removesuffix(ending)
            for head in ("ForCausalLM", "LMHeadModel"):
                if stem + head in MODELS:
                    return stem + head
    return architecture
