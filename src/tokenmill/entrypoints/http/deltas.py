"""Pieces of a message in the two shapes of the protocol: deltas of a stream, and whole messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET

from tokenmill.entrypoints.http.replies import ChatMessage, CustomCall, FunctionCall, ToolCall
from tokenmill.entrypoints.parsers.events import (
    CallArguments,
    CallStart,
    ContentPiece,
    Event,
    ReasoningPiece,
)

_encode = msgspec.json.encode
_KINDS = {False: ("function", "arguments"), True: ("custom", "input")}
"""Whether a call is one of a custom tool, to its type and the field that has its text."""


def delta_of(event: Event, reasoning_fields: Sequence[str]) -> bytes:
    """The delta of a chunk, as JSON. A call comes with its id and name first, then with pieces of
    its arguments.
    """
    match event:
        case ContentPiece(text):
            return _encode({"content": text})
        case ReasoningPiece(text):
            return _encode(dict.fromkeys(reasoning_fields, text))
        case CallStart(index, call_id, name, is_custom):
            kind, text = _KINDS[is_custom]
            call = {"index": index, "id": call_id, "type": kind, kind: {"name": name, text: ""}}
            return _encode({"tool_calls": [call]})
        case CallArguments(index, piece, is_custom):
            kind, text = _KINDS[is_custom]
            return _encode({"tool_calls": [{"index": index, kind: {text: piece}}]})


def message_of(events: Iterable[Event], reasoning_fields: Sequence[str]) -> ChatMessage:
    """All of an answer. Its content is null if there is none."""
    content: list[str] = []
    reasoning: list[str] = []
    starts: list[CallStart] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case ContentPiece(text):
                content.append(text)
            case ReasoningPiece(text):
                reasoning.append(text)
            case CallStart():
                starts.append(event)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    calls = [_call(*each) for each in zip(starts, map("".join, arguments), strict=True)]
    message = ChatMessage(
        role="assistant",
        content="".join(content) if content else None,
        tool_calls=calls or UNSET,
    )
    if reasoning:
        for name in reasoning_fields:
            setattr(message, name, "".join(reasoning))
    return message


def _call(start: CallStart, text: str) -> ToolCall:
    if start.is_custom:
        custom = CustomCall(name=start.name, input=text)
        return ToolCall(id=start.call_id, type="custom", custom=custom)
    return ToolCall(id=start.call_id, function=FunctionCall(name=start.name, arguments=text))
