"""The messages of gpt-oss (harmony): an answer is several messages, each on a channel.

<|channel|>analysis<|message|>...<|end|>                                    reasoning
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
<|start|>assistant<|channel|>final<|message|>...<|return|>                  content
"""

from __future__ import annotations

import re

from tokenmill.entrypoints.parsers.events import EventSink
from tokenmill.entrypoints.parsers.reader import Emit, Marks, Steps, TextReader

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.:/-]+)")
_BEGINNINGS = Marks([START, CHANNEL])
_HEADER_ENDS = Marks([MESSAGE, END, CALL, RETURN])
_BODY_ENDS = Marks([END, CALL, RETURN, START, CHANNEL])


class HarmonyParser:
    """One answer, reasoning and calls included. Without `may_call`, calls are content."""

    def __init__(self, sink: EventSink, *, may_call: bool = True) -> None:
        self._sink = sink
        self._may_call = may_call

    def read(self, reader: TextReader) -> Steps[None]:
        """The whole answer."""
        mark = yield from reader.until(_BEGINNINGS, self._sink.content)
        while mark is not None:
            reader.record(mark)
            header: list[str] = []
            end = yield from reader.until(_HEADER_ENDS, header.append)
            if end != MESSAGE:
                self._sink.content(reader.recorded())
                mark = yield from reader.until(_BEGINNINGS, self._sink.content)
                continue
            reader.recorded()
            mark = yield from self._body(reader, "".join(header))
            if mark not in (START, CHANNEL):
                mark = yield from reader.until(_BEGINNINGS, self._sink.content)

    def _body(self, reader: TextReader, header: str) -> Steps[str | None]:
        """A message's text, to where its header sends it; returns the mark that ended it."""
        recipient = _RECIPIENT.search(header)
        channel = header.rpartition(CHANNEL)[2].strip()
        if recipient is None or not self._may_call:
            is_reasoning = channel.startswith("analysis")
            emit: Emit = self._sink.reasoning if is_reasoning else self._sink.content
            return (yield from reader.until(_BODY_ENDS, emit))
        self._sink.start_call(recipient[1])
        sizes: list[int] = []

        def pass_on(text: str) -> None:
            text = text if sizes else text.lstrip()
            if text:
                sizes.append(len(text))
                self._sink.arguments(text)

        mark = yield from reader.until(_BODY_ENDS, pass_on)
        if not sizes and mark is not None:
            self._sink.arguments("{}")
        return mark
