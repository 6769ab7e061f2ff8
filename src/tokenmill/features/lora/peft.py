"""An adapter's directory in PEFT's format, as far as it can be read without a model.

adapter_config.json         rank, scale, and which kind of adapter it is
adapter_model.safetensors   for each module it changes, lora_A [rank, in] and lora_B [out, rank]
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenmill.errors import AdapterError, shown

T = TypeVar("T")

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_REPEATS = 3
"""Repetitions in a name's pattern: what a match may take grows with their power."""

_REFUSED = {
    "use_dora": "DoRA, which rescales the columns of the weights",
    "modules_to_save": "whole modules that were trained",
    "lora_bias": "trained biases",
    "trainable_token_indices": "trained embeddings",
    "layer_replication": "layers that were repeated",
    "target_parameters": "parameters that are no modules of their own, such as experts",
    "use_qalora": "QA-LoRA, which pools its input",
    "alora_invocation_tokens": "activated LoRA, which depends on the prompt's tokens",
    "arrow_config": "a mixture of adapters",
    "use_bdlora": "block-diagonal matrices",
}
"""Settings that change what is computed, and what they stand for."""
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways to initialise an adapter that change the model's own weights."""


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What adapter_config.json says of the sizes."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices, by its name."""
        return next(_matching(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of a module's matrices is multiplied with."""
        rank = self.rank_of(module)
        alpha = next(_matching(self.alpha_pattern, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def largest_rank(self) -> int:
        return max(self.rank, *self.rank_pattern.values()) if self.rank_pattern else self.rank

    def canonical(self) -> bytes:
        """The same bytes for the same settings, however the file was written."""
        values = [
            self.rank, self.alpha, self.use_rslora,
            sorted(self.rank_pattern.items()), sorted(self.alpha_pattern.items()),
        ]  # fmt: skip
        return json.dumps(values).encode()


def read_settings(directory: Path) -> AdapterSettings:
    """Read and check adapter_config.json.

    Raises `AdapterError` for what is no LoRA adapter, or one of a kind that is not computed here.
    """
    config = _read_json(directory)
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(
            f"{directory}: peft_type={shown(kind)} is not LORA, which alone is read."
        )
    if config.get("bias", "none") != "none":
        raise AdapterError(
            f"{directory}: bias={shown(config['bias'])}: the adapter holds trained biases, which"
            f" are not supported; train it with bias='none'."
        )
    for key, what in _REFUSED.items():
        if config.get(key):
            raise AdapterError(f"{directory}: {key} asks for {what}: that is not supported.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise AdapterError(
            f"{directory}: init_lora_weights={shown(start)}: the adapter was trained beside weights"
            f" that are not the model's own; convert it to a plain adapter first."
        )
    return AdapterSettings(
        rank=_positive_int(directory, "r", config.get("r", 8)),
        alpha=_number(directory, "lora_alpha", config.get("lora_alpha", 8)),
        use_rslora=bool(config.get("use_rslora", False)),
        rank_pattern={
            key: _positive_int(directory, f"rank_pattern[{key!r}]", value)
            for key, value in _pattern(directory, config, "rank_pattern").items()
        },
        alpha_pattern={
            key: _number(directory, f"alpha_pattern[{key!r}]", value)
            for key, value in _pattern(directory, config, "alpha_pattern").items()
        },
    )


def weights_file(directory: Path) -> Path:
    """The file with the matrices. Raises `AdapterError` if there is none that can be read."""
    file = directory / WEIGHTS
    if file.is_file():
        return file
    if (directory / _PICKLED).is_file():
        raise AdapterError(
            f"{directory} has its weights as {_PICKLED}, a format that can run code, which is never"
            f" read; save the adapter as {WEIGHTS}."
        )
    raise AdapterError(f"{directory} holds no {WEIGHTS}.")


def signature(directory: Path) -> tuple[tuple[int, int, int], ...]:
    """What changes when the adapter's files are replaced. Raises `AdapterError` if they cannot be
    looked at.
    """
    try:
        found = [(directory / name).stat() for name in (CONFIG, WEIGHTS)]
    except OSError as error:
        raise AdapterError(
            f"{directory} is no adapter that can be read: {error.strerror}: {error.filename}."
        ) from error
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)


def _read_json(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG
    if not directory.is_dir():
        raise AdapterError(f"There is no directory {directory}.")
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise AdapterError(f"{file} is larger than {_MAX_CONFIG_BYTES} bytes.")
        config = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise AdapterError(f"{directory} holds no {CONFIG}, so it is no adapter.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{file} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{file} holds no JSON object.")
    return config


def _pattern(directory: Path, config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise AdapterError(f"{directory}: {key}={shown(value)} must be an object.")
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterError(f"{directory}: {key} holds {shown(pattern)}: {error}.") from error
        if sum(map(pattern.count, "*+{")) > _MAX_REPEATS:
            raise AdapterError(
                f"{directory}: {key} holds {shown(pattern)}, which repeats more than"
                f" {_MAX_REPEATS} times (*, +, {{): list the names in its place."
            )
    return value


def _matching(pattern: Mapping[str, T], module: str) -> Iterator[T]:
    """Entries whose key is the module's name, or its end, as a regular expression."""
    return (value for key, value in pattern.items() if re.fullmatch(rf"(.*\.)?({key})", module))


def _positive_int(directory: Path, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterError(f"{directory}: {key}={shown(value)} must be a positive integer.")
    return value


def _number(directory: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AdapterError(f"{directory}: {key}={shown(value)} must be a finite number.")
    return float(value)
