"""Pieces of a message in the two shapes of the protocol: deltas of a stream, and whole messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET

from tokenmill.entrypoints.http.replies import ChatMessage, FunctionCall, ToolCall
from tokenmill.entrypoints.parsers.events import (
    CallArguments,
    CallStart,
    ContentPiece,
    Event,
    ReasoningPiece,
)

_encode = msgspec.json.encode


def delta_of(event: Event, reasoning_fields: Sequence[str]) -> bytes:
    """The delta of a chunk, as JSON. A call comes with its id and name first, then with pieces of
    its arguments.
    """
    match event:
        case ContentPiece(text):
            return _encode({"content": text})
        case ReasoningPiece(text):
            return _encode(dict.fromkeys(reasoning_fields, text))
        case CallStart(index, call_id, name):
            call = {
                "index": index,
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
            return _encode({"tool_calls": [call]})
        case CallArguments(index, text):
            piece = {"index": index, "function": {"arguments": text}}
            return _encode({"tool_calls": [piece]})


def message_of(events: Iterable[Event], reasoning_fields: Sequence[str]) -> ChatMessage:
    """All of an answer. Its content is null if there is none."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case ContentPiece(text):
                content.append(text)
            case ReasoningPiece(text):
                reasoning.append(text)
            case CallStart(_, call_id, name):
                calls.append(ToolCall(id=call_id, function=FunctionCall(name=name, arguments="")))
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    for call, pieces in zip(calls, arguments, strict=True):
        call.function.arguments = "".join(pieces)
    message = ChatMessage(
        role="assistant",
        content="".join(content) if content else None,
        tool_calls=calls or UNSET,
    )
    if reasoning:
        for name in reasoning_fields:
            setattr(message, name, "".join(reasoning))
    return message
