"""Defaults that a model brings along: sampling parameters and end ids."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from tokenmill.config.argument_types import one_of
from tokenmill.config.engine_args import EngineArgs
from tokenmill.errors import ConfigError, InvalidRequestError
from tokenmill.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of generation_config.json that are defaults, and the parameters they set."""

SOURCES = ("auto", "none")


def generation_config(args: EngineArgs, from_model: Mapping[str, Any]) -> dict[str, Any]:
    """The model's generation config with the user's overrides laid over it, key by key."""
    source = one_of("generation_config", args.generation_config, SOURCES)
    merged = dict(from_model) if source == "auto" else {}
    merged.update(args.override_generation_config)
    return merged


def default_sampling_params(config: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of a request that brings none of its own.

    Raises `ConfigError` if the generation config holds a value that no request may have.
    """
    given = {
        parameter: config[key]
        for key, parameter in _SAMPLING_KEYS.items()
        if config.get(key) is not None
    }
    try:
        params = SamplingParams(**given)
    except InvalidRequestError as error:
        raise ConfigError(
            f"generation_config: {error} Set generation_config='none' to do without it."
        ) from error
    if given:
        logger.info(
            "Requests without sampling parameters of their own use the model's: %s"
            " (generation_config='none' turns this off).",
            ", ".join(f"{name}={value}" for name, value in given.items()),
        )
    return params


def end_token_ids(*sources: object) -> tuple[int, ...]:
    """Every id that ends a text: the union of the sources, each an id, a list, or None."""
    found: dict[int, None] = {}
    for source in sources:
        values = source if isinstance(source, Iterable) else [source]
        found.update((value, None) for value in values if isinstance(value, int) and value >= 0)
    return tuple(found)
