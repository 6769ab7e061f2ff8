"""Calls written as JSON objects with a name and arguments: most families of models.

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    llama3_json   {"name": "f", "parameters": {...}}; {...}       with or without <|python_tag|>
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]   or [TOOL_CALLS]f[ARGS]{...}

What begins like a call and is none, is content. Arguments are passed on as they come; should they
turn out to be no JSON, all that the model wrote in their place is passed on.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from enum import Enum

from tokenmill.entrypoints.parsers.events import EventSink
from tokenmill.entrypoints.parsers.json_text import (
    PendingCall,
    arguments,
    json_string,
    json_value,
)
from tokenmill.entrypoints.parsers.reader import Marks, Steps, TextReader, ignore

_NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
_CALL_ID = re.compile(r"[A-Za-z0-9]*")


class Outcome(Enum):
    """What became of something that may be a call."""

    NONE = "none"
    """It is none; what was read of it is the reader's record."""
    CALL = "call"
    """It is one, and complete."""
    BROKEN = "broken"
    """It has begun, and its arguments are no JSON from here on."""


def call_object(
    reader: TextReader, sink: EventSink, *, known_names: Set[str] | None = None
) -> Steps[Outcome]:
    """Read `{"name": ..., "arguments": {...}}`, in any order and with other keys beside them.

    With `known_names` the object has no mark before it: any other name, or none, or missing
    arguments, make it an ordinary object.
    """
    call = PendingCall(sink)
    name: str | None = None
    if not (yield from reader.literal("{")):
        return Outcome.NONE
    yield from reader.blanks()
    is_empty = yield from reader.literal("}")
    while not is_empty:
        key = yield from json_string(reader)
        if key is None or not (yield from _colon(reader)):
            return _broken_off(call)
        if key == "name" and name is None:
            name = yield from json_string(reader)
            if not name or (known_names is not None and name not in known_names):
                return Outcome.NONE
            call.set_name(name)
        elif key in ("arguments", "parameters") and not call.has_arguments:
            if not (yield from arguments(reader, call)):
                return Outcome.BROKEN if call.has_begun else Outcome.NONE
        elif not (yield from json_value(reader, ignore)):
            return _broken_off(call)
        yield from reader.blanks()
        if (yield from reader.literal("}")):
            break
        if not (yield from reader.literal(",")):
            return _broken_off(call)
        yield from reader.blanks()
    if known_names is None or call.has_arguments:
        call.close()
    return _broken_off(call)


def _colon(reader: TextReader) -> Steps[bool]:
    yield from reader.blanks()
    found = yield from reader.literal(":")
    yield from reader.blanks()
    return found


def _broken_off(call: PendingCall) -> Outcome:
    """Of an object that ends here, as it should or not."""
    return Outcome.CALL if call.has_begun else Outcome.NONE


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """How a family marks its calls."""

    start: str
    end: str | None = None
    bare: bool = False
    """An answer may also begin with a call that has no mark."""


class JsonCallParser:
    """One answer of a family that writes calls as JSON objects, alone or in a list."""

    def __init__(self, sink: EventSink, style: JsonStyle, names: Set[str]) -> None:
        """`names` are those of the request's tools."""
        self._sink = sink
        self._style = style
        self._names = names
        self._starts = Marks([style.start])
        self._ends = None if style.end is None else Marks([style.end])

    def read(self, reader: TextReader) -> Steps[None]:
        """The whole answer."""
        if self._style.bare:
            reader.record()
            yield from reader.blanks()
            if (yield from reader.peek()) in ("{", "["):
                yield from self._calls(reader, known_names=self._names)
            else:
                self._sink.content(reader.recorded())
        while (mark := (yield from reader.until(self._starts, self._sink.content))) is not None:
            reader.record(mark)
            yield from reader.blanks()
            yield from self._marked(reader)

    def _marked(self, reader: TextReader) -> Steps[None]:
        """What follows a mark."""
        yield from self._calls(reader, known_names=None)

    def _calls(self, reader: TextReader, *, known_names: Set[str] | None) -> Steps[None]:
        """One call, or several in a list or behind one another, and the end mark."""
        sink = self._sink
        if (yield from reader.literal("[")):
            yield from reader.blanks()
        while True:
            outcome = yield from call_object(reader, sink, known_names=known_names)
            if outcome is Outcome.NONE:
                sink.content(reader.recorded())
                return
            reader.record()
            if outcome is Outcome.BROKEN:
                yield from self._broken(reader)
                return
            if not (yield from self._is_more(reader)):
                reader.recorded()
                return

    def _is_more(self, reader: TextReader) -> Steps[bool]:
        """Read what is between calls; whether another one follows. Brackets too many are no text
        that anybody misses.
        """
        while True:
            yield from reader.blanks()
            if self._style.end is not None and (yield from reader.literal(self._style.end)):
                return False
            following = yield from reader.peek()
            if following == "{":
                return True
            if following in (",", ";"):
                reader.take(reader.pos + 1)
                yield from reader.blanks()
                return True
            if following not in ("]", "}"):
                return False
            reader.take(reader.pos + 1)

    def _broken(self, reader: TextReader) -> Steps[None]:
        """Arguments that are no JSON: as the model wrote them, up to the end mark."""
        if self._ends is None:
            yield from reader.rest(self._sink.arguments)
        else:
            yield from reader.until(self._ends, self._sink.arguments)


class MistralCallParser(JsonCallParser):
    """Knows Mistral's later form as well: the name without quotes, a mark, the arguments."""

    def _marked(self, reader: TextReader) -> Steps[None]:
        if (yield from reader.peek()) in ("{", "["):
            yield from self._calls(reader, known_names=None)
            return
        name = yield from reader.run(_NAME)
        if (yield from reader.literal("[CALL_ID]")):
            yield from reader.run(_CALL_ID)
        yield from reader.literal("[ARGS]")
        yield from reader.blanks()
        call = PendingCall(self._sink, name)
        if name and (yield from arguments(reader, call)):
            reader.record()
            return
        if not call.has_begun:
            self._sink.content(reader.recorded())
            return
        reader.record()
        yield from reader.until(self._starts, self._sink.arguments)
