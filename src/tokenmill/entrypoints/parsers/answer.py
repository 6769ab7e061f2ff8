"""One answer of a model as it comes: text in, pieces of a message out."""

from __future__ import annotations

from types import MappingProxyType

from tokenmill.entrypoints.parsers.events import Event, EventSink
from tokenmill.entrypoints.parsers.harmony import HarmonyParser
from tokenmill.entrypoints.parsers.reader import TextReader
from tokenmill.entrypoints.parsers.reasoning import ReasoningParser
from tokenmill.entrypoints.parsers.registry import Parser, ToolFormat
from tokenmill.entrypoints.parsers.xml_calls import Schemas
from tokenmill.tokenizer.reasoning import ReasoningFormat


class _Stage:
    """A parser and the text that it is given."""

    def __init__(self, parser: Parser) -> None:
        self._reader = TextReader()
        self._steps = parser.read(self._reader)
        self._is_done = False

    def push(self, text: str) -> None:
        """More text."""
        self._reader.push(text)
        self._go_on()

    def finish(self) -> None:
        """The text has ended."""
        self._reader.ended = True
        self._go_on()

    def _go_on(self) -> None:
        if not self._is_done:
            self._is_done = next(self._steps, self) is self


def _no_call_id() -> str:
    raise AssertionError("no parser that finds calls")


class AnswerParser:
    """Splits one answer into reasoning, content and calls.

    The result does not depend on how the text is cut, and no text is lost: what is neither
    reasoning nor a call is content. One object for each sequence.
    """

    def __init__(
        self,
        *,
        tools: ToolFormat | None = None,
        schemas: Schemas = MappingProxyType({}),
        max_calls: int | None = None,
        reasoning: ReasoningFormat | None = None,
        is_open: bool | None = None,
    ) -> None:
        """`tools` is None where no calls may come; `schemas` are those of the request's tools;
        `is_open` says whether the answer begins within the reasoning (see `ReasoningParser`).
        """
        self._sink = EventSink(
            _no_call_id if tools is None else tools.new_call_id,
            max_calls=max_calls,
            may_call=tools is not None,
        )
        self._stages: list[_Stage] = []
        """Each gives the next one its text."""
        if tools is not None:
            self._stages.append(_Stage(tools.make(self._sink, schemas)))
        elif reasoning is not None and reasoning.is_harmony:
            self._stages.append(_Stage(HarmonyParser(self._sink, may_call=False)))
        if reasoning is not None and not reasoning.is_harmony:
            answer = self._stages[0].push if self._stages else self._sink.content
            parser = ReasoningParser(self._sink, reasoning, is_open, answer)
            self._stages.insert(0, _Stage(parser))

    @property
    def num_calls(self) -> int:
        """Calls that have begun, those that were dropped included."""
        return self._sink.num_calls

    def push(self, text: str) -> list[Event]:
        """What more text brings."""
        if self._stages:
            self._stages[0].push(text)
        else:
            self._sink.content(text)
        return self._sink.take()

    def finish(self) -> list[Event]:
        """What was held back until the end."""
        for stage in self._stages:
            stage.finish()
        self._sink.finish()
        return self._sink.take()
