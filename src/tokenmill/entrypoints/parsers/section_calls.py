"""Calls in a section of marks, which are tokens of their own.

deepseek_v3    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{...}
```<｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>
deepseek_v31   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}
<｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>      without the line break
kimi_k2        <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0
<|tool_call_argument_begin|>{...}<|tool_call_end|> ...
<|tool_calls_section_end|>                       without line breaks
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenmill.entrypoints.parsers.events import EventSink
from tokenmill.entrypoints.parsers.json_text import PendingCall, arguments
from tokenmill.entrypoints.parsers.reader import Marks, Steps, TextReader

_NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
_FENCE = "```"
_NUMBERED = re.compile(r"(?:functions\.)?(.+?):[0-9]+")


@dataclass(frozen=True, slots=True)
class SectionMarks:
    """Marks of a family."""

    calls_begin: str
    calls_end: str
    call_begin: str
    call_end: str
    separator: str
    """Between a call's name and its arguments."""

    @property
    def all(self) -> tuple[str, ...]:
        """All of them."""
        begin, end = (self.calls_begin, self.calls_end), (self.call_begin, self.call_end)
        return (*begin, *end, self.separator)


DEEPSEEK = SectionMarks(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
KIMI = SectionMarks(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)


class SectionCallParser:
    """One answer; a family says how a call names its function."""

    marks: SectionMarks

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._starts = Marks([self.marks.calls_begin, self.marks.call_begin])
        self._call_end = Marks([self.marks.call_end])

    def read(self, reader: TextReader) -> Steps[None]:
        """The whole answer."""
        marks = self.marks
        while (mark := (yield from reader.until(self._starts, self._sink.content))) is not None:
            reader.record(mark)
            if mark == marks.calls_begin:
                yield from reader.blanks()
                if not (yield from reader.literal(marks.call_begin)):
                    self._sink.content(reader.recorded())
                    continue
            if (yield from self._call(reader)):
                reader.record()
                yield from reader.blanks()
                yield from reader.literal(marks.calls_end)
                reader.recorded()

    def _header(self, reader: TextReader) -> Steps[tuple[str, str | None]]:
        """(the function's name, empty if there is none; the call's id, if the model gives one)"""
        raise NotImplementedError

    def _call(self, reader: TextReader) -> Steps[bool]:
        """What follows the beginning of a call, up to its end; False if it is none."""
        name, call_id = yield from self._header(reader)
        call = PendingCall(self._sink, name, call_id)
        is_complete = False
        if name:
            yield from reader.blanks()
            is_complete = yield from arguments(reader, call)
        if not call.has_begun:
            self._sink.content(reader.recorded())
            return False
        reader.record()
        if not is_complete:
            yield from reader.until(self._call_end, self._sink.arguments)
            return True
        yield from reader.blanks()
        yield from reader.literal(_FENCE)
        yield from reader.blanks()
        yield from reader.literal(self.marks.call_end)
        return True


class DeepSeekCallParser(SectionCallParser):
    """DeepSeek's form before and since version 3.1."""

    marks = DEEPSEEK

    def _header(self, reader: TextReader) -> Steps[tuple[str, str | None]]:
        name = yield from reader.run(_NAME)
        if not (yield from reader.literal(self.marks.separator)):
            return "", None
        if name != "function" or (yield from reader.peek()) == "{":
            return name, None
        name = yield from reader.run(_NAME)
        yield from reader.blanks()
        yield from reader.literal(f"{_FENCE}json")
        return name, None


class KimiCallParser(SectionCallParser):
    """Kimi's form; its templates want to see the ids again that the model has given."""

    marks = KIMI

    def _header(self, reader: TextReader) -> Steps[tuple[str, str | None]]:
        yield from reader.blanks()
        call_id = yield from reader.run(_NAME)
        yield from reader.blanks()
        if not (yield from reader.literal(self.marks.separator)):
            return "", None
        numbered = _NUMBERED.fullmatch(call_id)
        return (call_id, None) if numbered is None else (numbered[1], call_id)
