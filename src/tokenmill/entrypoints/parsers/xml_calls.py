"""Calls written as marks around names and values.

    qwen3_coder    <tool_call>                      glm45    <tool_call>f
                   <function=f>                              <arg_key>city</arg_key>
                   <parameter=city>                          <arg_value>Paris</arg_value>
                   Paris                                     </tool_call>
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
from dataclasses import dataclass
from typing import Any

from tokenmill.entrypoints.parsers.events import EventSink
from tokenmill.entrypoints.parsers.reader import Marks, Steps, TextReader

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION_BEGIN, FUNCTION_END = "<function=", "</function>"
_NAME = re.compile(r"[^<>\n]*")

Schemas = Mapping[str, Mapping[str, Any] | None]
"""Name of a tool to the schema of its arguments."""


@dataclass(frozen=True, slots=True)
class ArgumentMarks:
    """What is written around the name and the value of an argument."""

    before_key: str
    after_key: str
    after_value: str


CODER_MARKS = ArgumentMarks("<parameter=", ">\n", "\n</parameter>\n")
GLM_MARKS = ArgumentMarks("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")


class TaggedCallParser:
    """One answer; a family says how a call begins and ends."""

    starts: Marks
    marks: ArgumentMarks
    ends_of_values: Marks

    def __init__(self, sink: EventSink, schemas: Schemas) -> None:
        self._sink = sink
        self._schemas = schemas

    def read(self, reader: TextReader) -> Steps[None]:
        """The whole answer."""
        while (mark := (yield from reader.until(self.starts, self._sink.content))) is not None:
            reader.record(mark)
            name = yield from self._name(reader, mark)
            if name:
                reader.recorded()
                yield from self._call(reader, name)
            else:
                self._sink.content(reader.recorded())

    def _name(self, reader: TextReader, mark: str) -> Steps[str]:
        """Read the function's name and all that makes certain that it is a call; empty if not."""
        raise NotImplementedError

    def _end(self, reader: TextReader) -> Steps[None]:
        """Read the end of a call, if it is there."""
        raise NotImplementedError

    def _call(self, reader: TextReader, name: str) -> Steps[None]:
        """Arguments, and the end of the call."""
        sink = self._sink
        sink.start_call(name)
        properties = (self._schemas.get(name) or {}).get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        before = "{"
        while True:
            yield from reader.blanks()
            if not (yield from reader.literal(self.marks.before_key)):
                break
            key = (yield from reader.run(_NAME)).strip()
            yield from self._after_key(reader)
            sink.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if not (yield from self._value(reader, is_string=is_string(known.get(key)))):
                return  # cut off
        if (yield from reader.peek()):
            sink.arguments("{}" if before == "{" else "}")
        yield from self._end(reader)

    def _after_key(self, reader: TextReader) -> Steps[None]:
        """Read what is between a name and its value, whatever the blanks."""
        for part in self.marks.after_key.split("\n"):
            yield from reader.literal(part)
            if part is not self.marks.after_key:
                yield from reader.literal("\n")

    def _value(self, reader: TextReader, *, is_string: bool) -> Steps[bool]:
        """One value, as JSON; False if the text ends within it."""
        if is_string:
            self._sink.arguments('"')
            ended = yield from reader.until(self.ends_of_values, self._escaped)
            if ended is not None:
                self._sink.arguments('"')
            return ended is not None
        pieces: list[str] = []
        ended = yield from reader.until(self.ends_of_values, pieces.append)
        if ended is not None:
            self._sink.arguments(_as_json("".join(pieces)))
        return ended is not None

    def _escaped(self, text: str) -> None:
        self._sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


class CoderCallParser(TaggedCallParser):
    """Qwen3-Coder's form; the outer marks may be missing."""

    starts = Marks([CALL_BEGIN, FUNCTION_BEGIN])
    marks = CODER_MARKS
    ends_of_values = Marks(["\n</parameter>", "</parameter>"])

    def _name(self, reader: TextReader, mark: str) -> Steps[str]:
        if mark == CALL_BEGIN:
            yield from reader.blanks()
            if not (yield from reader.literal(FUNCTION_BEGIN)):
                return ""
        name = (yield from reader.run(_NAME)).strip()
        return name if (yield from reader.literal(">")) else ""

    def _end(self, reader: TextReader) -> Steps[None]:
        yield from reader.literal(FUNCTION_END)
        blanks = yield from reader.blanks()
        if not (yield from reader.literal(CALL_END)):
            self._sink.content(blanks)


class GlmCallParser(TaggedCallParser):
    """The form of GLM 4.5 and its successors."""

    starts = Marks([CALL_BEGIN])
    marks = GLM_MARKS
    ends_of_values = Marks(["</arg_value>"])

    def _name(self, reader: TextReader, mark: str) -> Steps[str]:
        name = (yield from reader.run(_NAME)).strip()
        yield from reader.blanks()
        for following in (GLM_MARKS.before_key, CALL_END):
            if (yield from reader.is_next(following)):
                return name
        return ""

    def _end(self, reader: TextReader) -> Steps[None]:
        yield from reader.literal(CALL_END)


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
