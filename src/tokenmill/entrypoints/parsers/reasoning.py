"""Splits an answer into the reasoning before it and the answer proper."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.entrypoints.parsers.events import EventSink
from tokenmill.entrypoints.parsers.reader import Emit, Marks, Steps, TextReader
from tokenmill.tokenizer.reasoning import MAX_BLANKS, ReasoningFormat, ReasoningMarkers


class ReasoningParser:
    """One answer: `<think>` reasoning `</think>` answer, or whatever the marks are."""

    def __init__(
        self, sink: EventSink, form: ReasoningFormat, is_open: bool | None, answer: Emit
    ) -> None:
        """`is_open`: whether the answer begins within the reasoning; None if it may begin with the
        start mark. `answer` gets the text behind the reasoning.
        """
        self._sink = sink
        self._form = form
        self._is_open = is_open
        self._answer = answer
        self._ends = Marks([form.end])

    def read(self, reader: TextReader) -> Steps[None]:
        """The whole answer."""
        if self._is_open is not False:
            reader.record()
            yield from reader.blanks()
            # Models repeat a mark that their prompt has set already.
            if (yield from reader.literal(self._form.start)) or self._is_open:
                reader.recorded()
                yield from reader.until(self._ends, self._sink.reasoning)
                yield from reader.blanks()
            else:
                self._answer(reader.recorded())
        if self._form.answer is not None:
            start, end = self._form.answer
            if (yield from reader.literal(start)):
                yield from reader.until(Marks([end]), self._answer)
        yield from reader.rest(self._answer)


def open_after_text(form: ReasoningFormat, prompt: str) -> bool | None:
    """What `ReasoningMarkers.open_after` says, for the text of a prompt."""
    end = prompt.rstrip()
    if end.endswith(form.start):
        return True
    if end.endswith(form.end):
        return False
    return True if form.assumed_open else None


class ReasoningCounter:
    """Counts the tokens between the marks of one answer, which may come in pieces."""

    def __init__(self, markers: ReasoningMarkers, is_open: bool | None) -> None:
        self._markers = markers
        self._is_open = is_open
        """None until the start mark comes; False for good once the end mark has come."""
        self._mark = markers.end_ids if is_open else markers.start_ids
        """The one to wait for."""
        self._latest: list[int] = []
        """As many ids as the mark has."""
        self._num_seen = 0
        self.count = 0

    def update(self, token_ids: Sequence[int]) -> None:
        """The next tokens."""
        for token_id in token_ids:
            if self._is_open is False:
                return
            self._update(token_id)

    def _update(self, token_id: int) -> None:
        self._num_seen += 1
        self.count += self._is_open is True
        self._latest.append(token_id)
        if len(self._latest) > len(self._mark):
            del self._latest[0]
        has_mark = tuple(self._latest) == self._mark
        if self._is_open and has_mark:
            self.count -= len(self._mark)
            self._is_open = False
        elif has_mark:
            self._is_open = True
            self._mark = self._markers.end_ids
            self._latest.clear()
        elif self._is_open is None and self._num_seen >= len(self._mark) + MAX_BLANKS:
            self._is_open = False  # marks further inside are text
