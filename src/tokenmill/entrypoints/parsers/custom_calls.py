"""Custom tools, whose input is any text.

Models call functions with JSON, so such a tool is shown to them as a function of one text, which is
taken out of its calls.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tokenmill.entrypoints.parsers.answer import AnswerParser
from tokenmill.entrypoints.parsers.events import CallArguments, CallStart, Event

CUSTOM_INPUT = "input"
"""The argument that models see."""


def custom_parameters(pattern: str | None) -> dict[str, Any]:
    """The schema of the function; `pattern` is a regular expression that the text must match."""
    text = {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }


def custom_input(arguments: str) -> str:
    """The text in a call's arguments; all of them where the model wrote something else."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


class CustomCallParser(AnswerParser):
    """Calls of custom tools are marked as such, and the input of each comes in one piece."""

    def __init__(self, names: Collection[str], **options: Any) -> None:
        """`names` of the custom tools; `options` are those of an `AnswerParser`."""
        super().__init__(**options)
        self._names = names
        self._held: list[str] | None = None
        """Arguments so far of the custom call that is open."""
        self._index = 0

    def push(self, text: str) -> list[Event]:
        """What more text brings."""
        return self._read(super().push(text))

    def finish(self) -> list[Event]:
        """What was held back until the end."""
        events = self._read(super().finish())
        self._flush(events)
        return events

    def _read(self, found: list[Event]) -> list[Event]:
        events: list[Event] = []
        for event in found:
            if isinstance(event, CallArguments) and self._held is not None:
                self._held.append(event.text)
                continue
            self._flush(events)
            if isinstance(event, CallStart) and event.name in self._names:
                self._held, self._index = [], event.index
                event = replace(event, is_custom=True)
            events.append(event)
        return events

    def _flush(self, events: list[Event]) -> None:
        held, self._held = self._held, None
        if held is not None and (text := custom_input("".join(held))):
            events.append(CallArguments(self._index, text, is_custom=True))
