"""Prompts for a load: random words, or the first turns of conversations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.entrypoints.bench.load_options import LoadOptions
from tokenmill.errors import ConfigError

CHARS_PER_TOKEN = 4.0
"""Of English text, where nobody counts tokens."""
_LONGEST = 4_096
"""Characters of a turn; longer ones would fill the context of small models."""
_SHORTEST = 4
_MIN_OUTPUT, _MAX_OUTPUT = 4, 1_024
_NOUNS = (
    "time year people way day man thing woman life child world school state family student group"
    " country problem hand part place case week company system program question work government"
    " number night point home water room mother area money story fact month lot right study book"
    " eye job word business issue side kind head house service friend father power hour game line"
    " end member law car city name president team minute idea kid body information back parent"
    " face others level office door health person art war history party result change morning"
    " reason research girl guy moment air teacher force education"
)
"""Words that most vocabularies hold as one token, behind a blank."""


@dataclass(frozen=True, slots=True)
class LoadPrompt:
    """One request to make."""

    text: str
    output_len: int
    """Tokens to ask for."""


def load_prompts(options: LoadOptions, chars_per_token: float) -> list[LoadPrompt]:
    """`num_prompts` of them, the same for the same options. Raises `ConfigError`."""
    draw = random.Random(options.seed)
    if options.sharegpt is None:
        words = _NOUNS.split()
        return [
            LoadPrompt(" ".join(draw.choices(words, k=options.input_len)), options.output_len)
            for _ in range(options.num_prompts)
        ]
    turns = list(_first_turns(Path(options.sharegpt)))
    if not turns:
        raise _no_turns(Path(options.sharegpt))
    draw.shuffle(turns)
    chosen = [turns[number % len(turns)] for number in range(options.num_prompts)]
    return [LoadPrompt(text, _output_len(answer, chars_per_token)) for text, answer in chosen]


def answered_lengths(path: Path, chars_per_token: float) -> list[tuple[int, int]]:
    """Tokens of the first turns in a ShareGPT file, and of their answers. Raises `ConfigError`."""
    lengths = [
        (max(round(len(text) / chars_per_token), 1), _output_len(answer, chars_per_token))
        for text, answer in _first_turns(path)
    ]
    if not lengths:
        raise _no_turns(path)
    return lengths


def _no_turns(path: Path) -> ConfigError:
    return ConfigError(f"sharegpt={path}: holds no conversation of two short turns.")


def _output_len(answer: str, chars_per_token: float) -> int:
    return min(max(round(len(answer) / chars_per_token), _MIN_OUTPUT), _MAX_OUTPUT)


def _first_turns(path: Path) -> Iterator[tuple[str, str]]:
    """(prompt, answer) of each conversation that begins with a person."""
    try:
        conversations = msgspec.json.decode(path.expanduser().read_bytes(), type=list[Any])
    except OSError as error:
        raise ConfigError(f"sharegpt={path}: cannot be read: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"sharegpt={path}: is no JSON list: {error}.") from error
    for conversation in conversations:
        turns = conversation.get("conversations", []) if isinstance(conversation, dict) else []
        values = [_value(turn) for turn in turns[:2]]
        if len(values) == 2 and _is_person(turns[0]):
            prompt, answer = values
            if all(_SHORTEST <= len(value) <= _LONGEST for value in values):
                yield prompt, answer


def _value(turn: Any) -> str:
    value = turn.get("value") if isinstance(turn, dict) else None
    return value if isinstance(value, str) else ""


def _is_person(turn: Any) -> bool:
    return turn.get("from") in ("human", "user")
