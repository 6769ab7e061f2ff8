"""What operators ask of an engine core besides requests: to sleep, to wake up, to take other
weights.

An engine is awake, or some of it is asleep, under these names (tags):

    scheduling   no step is begun; requests wait
    kv_cache     the KV cache has no memory
    weights      the weights have no memory, or are not those of one model
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import msgspec

from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.sleep import check_sleep, check_weight_update
from tokenmill.errors import ConfigError, InvalidRequestError, did_you_mean, shown

if TYPE_CHECKING:
    import torch

SCHEDULING, KV_CACHE, WEIGHTS = TAGS = ("scheduling", "kv_cache", "weights")
MODES = ("abort", "wait", "keep")
"""What becomes of requests that have begun: they end, or are waited for, or go on afterwards."""
LEVELS = (0, 1, 2)
"""Asleep are the scheduling; the KV cache as well; the weights as well."""
FIRST_VERSION = "default"
"""Of the weights that an engine starts with."""
_MAX_VERSION = 256

Tensors = Iterable[tuple[str, "torch.Tensor"]]
"""Weights by the names that they have in a checkpoint."""


class Sleep(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """Pause, and give memory back."""

    level: int = 1
    mode: str = "abort"
    clear_cache: bool = False
    """At level 0: forget cached prefixes. Above, they are gone anyway."""


class WakeUp(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Take memory back, and go on."""

    tags: tuple[str, ...] = TAGS


class UpdateWeights(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Replace the weights by those of a directory or file with the same config."""

    path: str
    """Empty for weights that come as tensors."""
    version: str = ""
    """Their name; empty counts the updates."""
    mode: str = "wait"


Operation = Sleep | WakeUp | UpdateWeights


class EngineState(msgspec.Struct, array_like=True, frozen=True):
    """What of a core is asleep, and whose weights it has."""

    asleep: tuple[str, ...] = ()
    """In the order of `TAGS`."""
    weight_version: str = FIRST_VERSION
    level: int | None = None
    """At which it was put to sleep; None where nothing is asleep."""

    @property
    def is_sleeping(self) -> bool:
        """Whether anything is asleep, at whichever level."""
        return bool(self.asleep)


class ModelMemory(Protocol):
    """A model's memory. All calls are the engine's thread's, while no step is under way."""

    @property
    def has_weights(self) -> bool:
        """Whether the model can be run: all weights are there, and belong together."""
        ...

    def sleep(self, level: int) -> int:
        """Give the system back what the KV cache takes, and at level 2 the weights: bytes of
        addresses that concerns. Blocks then hold nothing.
        """
        ...

    def wake_up(self) -> None:
        """Fill weights again that were dropped, from where they came; those that came as tensors
        stay away. Raises `CheckpointError`.
        """
        ...

    def update_weights(self, path: str, tensors: Tensors | None) -> None:
        """Fill the weights with `tensors`, or else with those at `path`.

        Raises `CheckpointError` and `InvalidRequestError`. `has_weights` says whether some are
        changed and others are not.
        """
        ...


class FixedMemory:
    """A model whose memory stays as it is."""

    has_weights = True

    def sleep(self, level: int) -> int:
        raise ConfigError(f"this engine has no memory to give back at level={level}.")

    def wake_up(self) -> None:
        """Nothing has been dropped."""

    def update_weights(self, path: str, tensors: Tensors | None) -> None:
        raise ConfigError("the weights of this engine cannot be replaced.")


def check_operation(operation: Operation, config: EngineConfig) -> None:
    """Raise `InvalidRequestError` for one that there is not, or not of such an engine."""
    match operation:
        case Sleep(level, mode):
            if level not in LEVELS or isinstance(level, bool):
                raise InvalidRequestError(
                    f"level={shown(level)} must be 0 (pause), 1 (and drop the KV cache) or 2 (and"
                    f" drop the weights).",
                    parameter="level",
                )
            _check_choice("mode", mode, MODES)
            check_sleep(config, level)
        case WakeUp(tags):
            for tag in tags:
                _check_choice("tags", tag, TAGS)
        case UpdateWeights(_, version, mode):
            _check_choice("mode", mode, MODES)
            _check_version(version)
            check_weight_update(config)


def _check_choice(parameter: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise InvalidRequestError(
            f"{parameter}: {shown(value)} is not one of: {', '.join(choices)}.{hint}",
            parameter=parameter,
        )


def _check_version(version: object) -> None:
    if not isinstance(version, str) or not version.isprintable() or len(version) > _MAX_VERSION:
        raise InvalidRequestError(
            f"version={shown(version)} must be a line of at most {_MAX_VERSION} characters.",
            parameter="version",
        )
