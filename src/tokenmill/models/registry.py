"""Architecture name -> model class, imported when asked for."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.errors import ConfigError, did_you_mean
from tokenmill.models.base import CausalLMClass


def _llama() -> CausalLMClass:
    from tokenmill.models.llama import LlamaForCausalLM

    return LlamaForCausalLM


MODELS: dict[str, Callable[[], CausalLMClass]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _llama,
}


def get_model_class(architecture: str) -> CausalLMClass:
    """The class of an architecture, as `architectures` of a config.json names it.

    Raises `ConfigError` for one we do not have.
    """
    if architecture not in MODELS:
        raise ConfigError(
            f"Models of architecture {architecture!r} are not supported."
            f"{did_you_mean(architecture, MODELS)} Supported: {', '.join(MODELS)}."
        )
    return MODELS[architecture]()
