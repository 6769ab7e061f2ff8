"""DeepSeek's calls, whose marks are tokens of their own.

    deepseek_v3    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
                   ```json
                   {...}
                   ```<｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>
    deepseek_v31   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}
                   <｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>      without the line break

One parser reads both.
"""

from __future__ import annotations

import re

from tokenmill.entrypoints.parsers.events import EventSink
from tokenmill.entrypoints.parsers.json_text import PendingCall, arguments
from tokenmill.entrypoints.parsers.reader import Marks, Steps, TextReader

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
_FENCE = "```"


class DeepSeekCallParser:
    """One answer."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._starts = Marks([CALLS_BEGIN, CALL_BEGIN])
        self._call_end = Marks([CALL_END])

    def read(self, reader: TextReader) -> Steps[None]:
        """The whole answer."""
        while (mark := (yield from reader.until(self._starts, self._sink.content))) is not None:
            reader.record(mark)
            if mark == CALLS_BEGIN:
                yield from reader.blanks()
                if not (yield from reader.literal(CALL_BEGIN)):
                    self._sink.content(reader.recorded())
                    continue
            if (yield from self._call(reader)):
                reader.record()
                yield from reader.blanks()
                yield from reader.literal(CALLS_END)
                reader.recorded()

    def _call(self, reader: TextReader) -> Steps[bool]:
        """What follows the beginning of a call, up to its end; False if it is none."""
        name = yield from self._header(reader)
        call = PendingCall(self._sink, name)
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
        yield from reader.literal(CALL_END)
        return True

    def _header(self, reader: TextReader) -> Steps[str]:
        """The function's name in either form; empty if there is none."""
        name = yield from reader.run(_NAME)
        if not (yield from reader.literal(SEPARATOR)):
            return ""
        if name != "function" or (yield from reader.peek()) == "{":
            return name
        name = yield from reader.run(_NAME)
        yield from reader.blanks()
        yield from reader.literal(f"{_FENCE}json")
        return name
