"""What the files of the sentence-transformers library say of a model directory.

modules.json                 the steps from text to vector: Transformer, Pooling, Normalize
1_Pooling/config.json        which hidden states are taken
sentence_bert_config.json    the length that texts were cut to
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.errors import CheckpointError, shown

MODULES = "modules.json"
_LENGTHS = ("sentence_bert_config.json", "sentence_roberta_config.json")
_POOLINGS = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "cls": "cls",
    "mean": "mean",
}
"""Names in the files, of older and newer versions, to ours."""
_OTHER_POOLINGS = ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class SentenceModel:
    """How a model makes one vector of a text."""

    pooling_type: str | None
    """`cls`, `mean` or `last`; None if there is no pooling step."""
    is_normalized: bool
    max_seq_length: int | None
    """Tokens, the special ones included; None if the files do not say."""


def read_sentence_model(path: Path) -> SentenceModel | None:
    """None for a directory without such files, or a single file.

    Raises `CheckpointError` for files that are damaged, or ask for what we do not do.
    """
    if not (path / MODULES).is_file():
        return None
    modules = _read(path / MODULES)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise CheckpointError(f"{path / MODULES}: must be a list of objects.")
    directories = {_kind(path, each): str(each.get("path", "")) for each in modules}
    pooling_type = None
    if "Pooling" in directories:
        pooling_type = _pooling_type(path / directories["Pooling"] / "config.json")
    return SentenceModel(pooling_type, "Normalize" in directories, _max_seq_length(path))


def _kind(path: Path, module: Mapping[str, Any]) -> str:
    kind = str(module.get("type", "")).rpartition(".")[2]
    if kind not in _KNOWN_MODULES:
        raise CheckpointError(
            f"{path / MODULES}: modules of type {shown(module.get('type'))} are not supported;"
            f" these are: {', '.join(_KNOWN_MODULES)}."
        )
    return kind


def _pooling_type(file: Path) -> str:
    config = _read_object(file)
    named = config.get("pooling_mode")
    names = (*_POOLINGS, *_OTHER_POOLINGS)
    on = [name for name in names if config.get(f"pooling_mode_{name}")]
    chosen = [_POOLINGS.get(name, name) for name in ([named] if isinstance(named, str) else on)]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS.values():
        raise CheckpointError(
            f"{file}: pools by {' and '.join(chosen) or 'nothing'}, which is not supported; one of"
            f" {', '.join(sorted(set(_POOLINGS.values())))} is."
        )
    return chosen[0]


def _max_seq_length(path: Path) -> int | None:
    for name in _LENGTHS:
        if (path / name).is_file():
            length = _read_object(path / name).get("max_seq_length")
            if length is None:
                return None
            if isinstance(length, bool) or not isinstance(length, int) or length < 2:
                raise CheckpointError(
                    f"{path / name}: max_seq_length is {shown(length)}, but must be an integer of"
                    f" at least 2."
                )
            return length
    return None


def _read_object(file: Path) -> Mapping[str, Any]:
    content = _read(file)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: must be an object.")
    return content


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not valid JSON: {error}.") from error
