"""Settings of structured output, as one group: `structured_outputs_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tokenmill.config.argument_types import check_keys, convert_fields
from tokenmill.errors import ConfigError, did_you_mean, shown

BACKENDS = ("llguidance", "xgrammar")
_ALIASES = {"auto": "llguidance", "guidance": "llguidance"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """How grammars are enforced. Raises `ConfigError` for a value that cannot work."""

    backend: str = "llguidance"
    """`llguidance` (also called `auto` or `guidance`) or `xgrammar`."""
    disable_any_whitespace: bool = False
    """JSON is compact for every request that says nothing else."""
    disable_additional_properties: bool = False
    """Schemas that do not speak of `additionalProperties` allow none, in every request."""
    enable_in_reasoning: bool = False
    """Enforce the form from the first token on, also while a model reasons."""
    enable_forced_tokens: bool = True
    """Append tokens that the grammar leaves no choice about without sampling them. The text is the
    same without."""
    compile_timeout: float = 1.5
    """Seconds that compiling one form may take; then its request is refused."""

    def __post_init__(self) -> None:
        convert_fields(self, f"{_NAME}.")
        backend = _ALIASES.get(self.backend, self.backend)
        if backend not in BACKENDS:
            raise ConfigError(
                f"{_NAME}.backend={shown(self.backend)} is not one of:"
                f" auto, {', '.join(BACKENDS)}.{did_you_mean(self.backend, BACKENDS)}"
            )
        object.__setattr__(self, "backend", backend)
        if not 0 < self.compile_timeout <= _MAX_TIMEOUT:
            raise ConfigError(
                f"{_NAME}.compile_timeout={self.compile_timeout} must be more than 0 and at most"
                f" {_MAX_TIMEOUT:g} seconds."
            )


_NAME = "structured_outputs_config"
_MAX_TIMEOUT = 600.0


def read_structured_outputs_config(given: Mapping[str, Any]) -> StructuredOutputsConfig:
    """The settings in a mapping. Raises `ConfigError` for one that nobody knows."""
    check_keys(_NAME, given, (each.name for each in fields(StructuredOutputsConfig)))
    return StructuredOutputsConfig(**given)


def same_backend(name: str, backend: str) -> bool:
    """Whether a name that somebody gave means this backend."""
    return _ALIASES.get(name, name) == backend
