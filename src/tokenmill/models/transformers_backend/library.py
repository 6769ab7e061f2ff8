"""The library: found, checked, and asked for its class of an architecture.

What it cannot be used for is refused here by name, before anything is built.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from tokenmill.errors import ConfigError, did_you_mean
from tokenmill.models.registry import INSTALL_TRANSFORMERS as INSTALL
from tokenmill.models.registry import MODELS

OLDEST = (5, 20)
"""The first version whose interfaces are those that are used here."""
HEADS = ("ForCausalLM", "LMHeadModel")
_HEADLESS = ("TextForSequenceClassification", "ForSequenceClassification", "TextModel", "Model")
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "full"}
"""What may stand in a config's `layer_types`; the probe finds out what a layer really does."""
_OTHER_INPUTS = ("vision_config", "audio_config", "vision_tower_config", "image_encoder_config")
_NOT_THE_MODELS_OWN = ("quantization_config", "auto_map", "transformers_version", "torch_dtype")
"""Keys of a config.json that must not reach the library: weights are read by our own code."""


def is_installed() -> bool:
    """Whether there is a transformers, of whatever version; it is not imported."""
    return importlib.util.find_spec("transformers") is not None


@functools.cache
def load_library() -> Any:
    """The module `transformers`. Raises `ConfigError` if it is missing or of a wrong version."""
    if not is_installed():
        raise ConfigError(f"model_impl='transformers' needs the transformers library: {INSTALL}.")
    library = importlib.import_module("transformers")
    version = tuple(int(part) for part in library.__version__.split(".")[:2])
    if not OLDEST <= version < (6,):
        raise ConfigError(
            f"transformers {library.__version__} is installed, but model_impl='transformers' needs"
            f" at least {'.'.join(map(str, OLDEST))} and less than 6: {INSTALL}."
        )
    return library


def library_module(name: str) -> Any:
    """A module of the library, such as `masking_utils`. Raises `ConfigError` as `load_library`."""
    load_library()
    return importlib.import_module(f"transformers.{name}")


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """A class of the library, and a config for it."""

    architecture: str
    """Name of the class, such as `GraniteForCausalLM`."""
    cls: Any
    config: Any

    def refuse(self, why: str, remedy: str = "") -> ConfigError:
        """The error that says why this model is not served."""
        end = f" {remedy}" if remedy else ""
        return ConfigError(f"{self.architecture} cannot run through transformers here: {why}.{end}")


def causal_name(architecture: str) -> str:
    """The decoder with a head for tokens that `architecture` is, or is otherwise.

    Raises `ConfigError` where the name says that it is none.
    """
    if architecture.endswith(HEADS):
        return architecture
    for ending in _HEADLESS:
        if architecture.endswith(ending):
            return architecture.removesuffix(ending) + HEADS[0]
    raise ConfigError(
        f"Models of architecture {architecture!r} are not supported: there is no native family for"
        f" it, and through transformers only decoders of text run (...ForCausalLM)."
    )


def library_model(hf_config: Mapping[str, Any]) -> LibraryModel:
    """The library's class for a config.json, and its config.

    Raises `ConfigError` for what cannot be served: architectures that the library does not know,
    code from a model's repository, encoder-decoders, models with images or sound, and layers that
    keep something else than keys and values.
    """
    library = load_library()
    architecture = causal_name(str(hf_config["architectures"][0]))
    cls = getattr(library, architecture, None)
    if cls is None:
        raise _unknown(architecture, hf_config, library.__version__)
    given = {key: value for key, value in hf_config.items() if key not in _NOT_THE_MODELS_OWN}
    decode = getattr(cls.config_class, "_decode_special_floats", dict)  # infinities, in JSON
    try:
        config = cls.config_class.from_dict(decode(given))
    except (AttributeError, KeyError, StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError(
            f"config.json: transformers' {cls.config_class.__name__} refuses it: {error}"
        ) from error
    model = LibraryModel(architecture, cls, config)
    _check_kind(model)
    return model


def _unknown(architecture: str, hf_config: Mapping[str, Any], version: str) -> ConfigError:
    known = f"transformers {version} has no class {architecture!r}"
    if hf_config.get("auto_map"):
        return ConfigError(
            f"{known}; its code is in the model's own repository (auto_map), and tokenmill never"
            f" runs code that comes with weights."
        )
    return ConfigError(
        f"{known}, and there is no native family.{did_you_mean(architecture, MODELS)} A newer"
        f" version of transformers may have it: {INSTALL}."
    )


def _check_kind(model: LibraryModel) -> None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise model.refuse("it is an encoder-decoder")
    others = [key for key in _OTHER_INPUTS if getattr(config, key, None) is not None]
    if others:
        raise model.refuse(f"it takes more than text (config.json has {', '.join(others)})")
    if getattr(config, "is_causal", True) is False or getattr(
        config, "use_bidirectional_attention", None
    ):
        raise model.refuse("its attention is not causal (config.json)")
    kinds = set(getattr(config, "layer_types", None) or ())
    strange = sorted(map(str, kinds - _LAYER_TYPES))
    if strange:
        raise model.refuse(
            f"its layers are of type {', '.join(strange)}, and only full and sliding attention"
            f" have a paged cache"
        )
    if getattr(model.cls, "_is_stateful", False) and not kinds:
        raise model.refuse("it keeps a recurrent state, and only keys and values are kept here")


def check_inputs(model: LibraryModel, base: Any) -> None:
    """Raise `ConfigError` unless the body `base` takes ids and their positions."""
    parameters = inspect.signature(base.forward).parameters
    missing = [name for name in ("input_ids", "position_ids") if name not in parameters]
    if missing:
        raise model.refuse(
            f"its forward takes no {' and no '.join(missing)}, so a flat batch of several requests"
            f" cannot be told to it"
        )


_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    "max_position_embeddings",
)
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "intermediate_size")


def completed(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """`hf_config` with the sizes that the engine needs, where the file has other names or none.

    The library knows them. Raises `ConfigError` as `library_model` does.
    """
    if all(isinstance(hf_config.get(key), int) for key in _SIZES):
        return dict(hf_config)
    config = library_model(hf_config).config
    sizes = {key: getattr(config, key, None) for key in (*_SIZES, *_OPTIONAL_SIZES)}
    if getattr(config, "multi_query", False):
        sizes["num_key_value_heads"] = 1
    found = {key: value for key, value in sizes.items() if isinstance(value, int)}
    return {**found, **hf_config}
