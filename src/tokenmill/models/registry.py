"""Architecture name -> model class, imported when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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
    "BertModel": "bert:BertModel",
    "BertForSequenceClassification": "bert:BertForSequenceClassification",
    "RobertaModel": "bert:BertModel",
    "RobertaForSequenceClassification": "bert:RobertaForSequenceClassification",
    "XLMRobertaModel": "bert:BertModel",
    "XLMRobertaForSequenceClassification": "bert:RobertaForSequenceClassification",
}
"""Architecture, as a config.json names it -> module of this package, and class."""


def get_model_class(architecture: str) -> CausalLMClass:
    """The class of an architecture.

    Raises `ConfigError` for one we do not have.
    """
    architecture = _with_head(architecture)
    if architecture not in MODELS:
        raise ConfigError(
            f"Models of architecture {architecture!r} are not supported."
            f"{did_you_mean(architecture, MODELS)} Supported: {', '.join(MODELS)}."
        )
    module, _, name = MODELS[architecture].partition(":")
    found: CausalLMClass = getattr(importlib.import_module(f"tokenmill.models.{module}"), name)
    return found


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
