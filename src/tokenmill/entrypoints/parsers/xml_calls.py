"""Calls written as marks around names and values: Qwen3-Coder's form.

    <tool_call>
    <function=f>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Values have no quotes; the tool's schema says which of them are strings. Those are passed on as they
come, others once they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenmill.entrypoints.parsers.events import EventSink
from tokenmill.entrypoints.parsers.reader import Marks, Steps, TextReader

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION_BEGIN, FUNCTION_END = "<function=", "</function>"
PARAMETER_BEGIN, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]*")
_STARTS = Marks([CALL_BEGIN, FUNCTION_BEGIN])
_VALUE_ENDS = Marks([f"\n{PARAMETER_END}", PARAMETER_END])

Schemas = Mapping[str, Mapping[str, Any] | None]
"""Name of a tool to the schema of its arguments."""


class XmlCallParser:
    """One answer."""

    def __init__(self, sink: EventSink, schemas: Schemas) -> None:
        self._sink = sink
        self._schemas = schemas

    def read(self, reader: TextReader) -> Steps[None]:
        """The whole answer."""
        while (mark := (yield from reader.until(_STARTS, self._sink.content))) is not None:
            reader.record(mark)
            is_call = mark == FUNCTION_BEGIN
            if not is_call:
                yield from reader.blanks()
                is_call = yield from reader.literal(FUNCTION_BEGIN)
            name = (yield from reader.run(_NAME)).strip() if is_call else ""
            if not name or not (yield from reader.literal(">")):
                self._sink.content(reader.recorded())
                continue
            reader.recorded()
            yield from self._call(reader, name)

    def _call(self, reader: TextReader, name: str) -> Steps[None]:
        """Parameters, and the end of the call."""
        sink = self._sink
        sink.start_call(name)
        properties = (self._schemas.get(name) or {}).get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        before = "{"
        while True:
            yield from reader.blanks()
            if not (yield from reader.literal(PARAMETER_BEGIN)):
                break
            key = (yield from reader.run(_NAME)).strip()
            yield from reader.literal(">")
            sink.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if not (yield from self._value(reader, is_string=is_string(known.get(key)))):
                return  # cut off
        if (yield from reader.peek()):
            sink.arguments("{}" if before == "{" else "}")
        yield from reader.literal(FUNCTION_END)
        blanks = yield from reader.blanks()
        if not (yield from reader.literal(CALL_END)):
            sink.content(blanks)

    def _value(self, reader: TextReader, *, is_string: bool) -> Steps[bool]:
        """One value, as JSON; False if the text ends within it."""
        yield from reader.literal("\n")
        if is_string:
            self._sink.arguments('"')
            ended = yield from reader.until(_VALUE_ENDS, self._escaped)
            if ended is not None:
                self._sink.arguments('"')
            return ended is not None
        pieces: list[str] = []
        ended = yield from reader.until(_VALUE_ENDS, pieces.append)
        if ended is not None:
            self._sink.arguments(_as_json("".join(pieces)))
        return ended is not None

    def _escaped(self, text: str) -> None:
        self._sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def is_string(schema: object) -> bool:
    """Whether a value is a string, whatever it looks like."""
    if not isinstance(schema, Mapping):
        return True
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return all(isinstance(value, str) for value in values)
    return schema.get("type") == "string"


def _as_json(text: str) -> str:
    """A value that may be no string: the text itself if it is JSON, else the text as a string."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(_SCALARS.get(text.strip(), text), ensure_ascii=False)
    return text.strip()


_SCALARS = {"True": True, "False": False, "None": None}
"""As Python writes them."""
