"""A tokenizer from a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from tokenmill.errors import CheckpointError
from tokenmill.tokenizer.tokenizer import DEFAULT_TEMPLATE, Tokenizer

MAX_TOKENIZER_BYTES = 256 * 2**20
"""Largest tokenizer.json that is read; the largest vocabularies in use need a tenth of it."""
MAX_CONFIG_BYTES = 16 * 2**20
_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "eot_token",
)
_END_TOKEN_NAMES = ("eos_token", "eot_token")

_PROCESSOR_FILES = ("processor_config.json", "chat_template.json")
"""Where older checkpoints of models that take images have their template; the second wins."""


def tokenizer_from_directory(directory: Path) -> Tokenizer:
    """Read tokenizer.json (or vocab.json and merges.txt) and the settings beside it.

    Raises `CheckpointError` if there is none, or a file is damaged or too large.
    """
    config = _read_object(directory / "tokenizer_config.json")
    backend = _read_backend(directory)
    special_tokens = _special_tokens(
        {**_read_object(directory / "special_tokens_map.json"), **config}
    )
    end_ids = [
        token_id
        for name in _END_TOKEN_NAMES
        if name in special_tokens
        and (token_id := backend.token_to_id(special_tokens[name])) is not None
    ]
    if not (directory / "tokenizer.json").is_file():
        # As in transformers: tokenizer.json alone says what is put around a text, if it is there.
        bos, eos = (
            special_tokens.get(f"{name}_token") if config.get(f"add_{name}_token") else None
            for name in ("bos", "eos")
        )
        backend.post_processor = surrounding(backend, bos, eos)
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_token_ids=end_ids,
        chat_templates=_chat_templates(directory, config),
    )


def _read_backend(directory: Path) -> tokenizers.Tokenizer:
    whole = directory / "tokenizer.json"
    if whole.is_file():
        _check_size(whole, MAX_TOKENIZER_BYTES)
        with _damage_reported(whole):
            return tokenizers.Tokenizer.from_file(str(whole))
    vocabulary, merges = directory / "vocab.json", directory / "merges.txt"
    if vocabulary.is_file() and merges.is_file():
        for path in (vocabulary, merges):
            _check_size(path, MAX_TOKENIZER_BYTES)
        with _damage_reported(vocabulary):
            backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        return backend
    raise CheckpointError(
        f"{directory} has no tokenizer.json (nor vocab.json with merges.txt);"
        f" convert its tokenizer with transformers (AutoTokenizer.from_pretrained and"
        f" save_pretrained), or name another one with `tokenizer=` (--tokenizer)."
    )


def _check_size(path: Path, limit: int) -> None:
    size = path.stat().st_size
    if size > limit:
        raise CheckpointError(
            f"{path} has {size} bytes, the limit is {limit}; is it the right file?"
        )


@contextmanager
def _damage_reported(path: Path) -> Iterator[None]:
    """Turn the library's failures into ours. It raises bare `Exception`, and for some damage a
    panic, which is a `BaseException`.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise CheckpointError(f"{path} is damaged: {error}. Download it again.") from error


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    _check_size(path, MAX_CONFIG_BYTES)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}.")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, each written as a string or as an object with `content`."""
    found = {}
    for name in _SPECIAL_TOKEN_NAMES:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str) and token:
            found[name] = token
    return found


def surrounding(
    backend: tokenizers.Tokenizer, bos: str | None, eos: str | None
) -> processors.TemplateProcessing:
    """A post-processor that puts `bos` before a text and `eos` behind it, where there are such."""
    known = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    before, after = (
        [] if token is None or known[token] is None else [token] for token in (bos, eos)
    )
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(token, known[token]) for token in dict.fromkeys([*before, *after])],
    )


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Files of their own win over those of a processor of images, which knows
    parts that the tokenizer's may not know; the configuration gives one source or a list of named
    ones.
    """
    templates: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        templates[DEFAULT_TEMPLATE] = given
    elif isinstance(given, list):
        for entry in given:
            if isinstance(entry, dict):
                templates[str(entry.get("name"))] = str(entry.get("template"))
    for name in _PROCESSOR_FILES:
        given = _read_object(directory / name).get("chat_template")
        if isinstance(given, str):
            templates[DEFAULT_TEMPLATE] = given
    files = {path.stem: path for path in directory.glob("additional_chat_templates/*.jinja")}
    files[DEFAULT_TEMPLATE] = directory / "chat_template.jinja"
    for name, path in files.items():
        if path.is_file():
            _check_size(path, MAX_CONFIG_BYTES)
            with _damage_reported(path):
                templates[name] = path.read_text(encoding="utf-8")
    return templates
