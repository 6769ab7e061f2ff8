"""What a parser finds in an answer, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BLANKS = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """Text for the reader of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins."""

    index: int
    call_id: str
    name: str
    is_custom: bool = False
    """Whether the tool takes a text in place of arguments."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; joined, they are what the model wrote. Of a custom tool, its
    input.
    """

    index: int
    text: str
    is_custom: bool = False


Event = ContentPiece | ReasoningPiece | CallStart | CallArguments


class EventSink:
    """Collects what parsers find; neighbours of one kind are joined.

    Blank lines that only separate things are left out: those around reasoning, those between the
    content and a call, and those of an answer that has nothing else beside its calls. So blanks at
    the end of what is known are held back until it is clear what follows.
    """

    def __init__(
        self, new_call_id: Callable[[], str], *, max_calls: int | None = None, may_call: bool = True
    ) -> None:
        """`max_calls`: further calls are dropped. Without `may_call` content is not held back."""
        self._new_call_id = new_call_id
        self._max_calls = max_calls
        self._may_call = may_call
        self.num_calls = 0
        self._kind: type[Event] | None = None
        """Of the pieces that are being joined."""
        self._pieces: list[str] = []
        self._events: list[Event] = []
        self._blanks: list[str] = []
        """Held back; they follow content."""
        self._before_call = ""
        """Those between the content and a call, should the content go on behind it."""
        self._reasoning_blanks: list[str] = []
        self._has_content = False
        self._has_reasoning = False

    def content(self, text: str) -> None:
        """Text of the answer."""
        if not self._may_call:
            self._add(ContentPiece, text)
            return
        body = text.rstrip(BLANKS)
        if body:
            if not self._has_content and self.num_calls:
                body = body.lstrip(BLANKS)
            elif self._blanks or body[0] in BLANKS:
                self._add(ContentPiece, "".join(self._blanks))
            else:
                self._add(ContentPiece, self._before_call)
            self._before_call = ""
            self._blanks.clear()
            self._has_content = True
            self._add(ContentPiece, body)
            text = text[len(text.rstrip(BLANKS)) :]
        if text:
            self._blanks.append(text)

    def reasoning(self, text: str) -> None:
        """Text of the reasoning; blanks around the whole of it are left out."""
        body = text.rstrip(BLANKS)
        if body:
            if self._has_reasoning:
                self._add(ReasoningPiece, "".join(self._reasoning_blanks))
                self._add(ReasoningPiece, body)
            else:
                self._add(ReasoningPiece, body.lstrip(BLANKS))
            self._reasoning_blanks.clear()
            self._has_reasoning = True
            text = text[len(body) :]
        if text:
            self._reasoning_blanks.append(text)

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """A call begins; what comes next are its arguments. Without an id it gets a new one."""
        if self._has_content:
            self._before_call = self._before_call or "".join(self._blanks)
        self._blanks.clear()
        self._flush()
        self.num_calls += 1
        if not self._is_dropped:
            self._events.append(CallStart(self.num_calls - 1, call_id or self._new_call_id(), name))

    def arguments(self, text: str) -> None:
        """More arguments of the latest call."""
        if not self._is_dropped:
            self._add(CallArguments, text)

    def finish(self) -> None:
        """No more text: blanks that were held back are part of an answer without calls."""
        if not self.num_calls:
            self._add(ContentPiece, "".join(self._blanks))
        self._blanks.clear()

    def take(self) -> list[Event]:
        """The events since the last time."""
        self._flush()
        events, self._events = self._events, []
        return events

    @property
    def _is_dropped(self) -> bool:
        return self._max_calls is not None and self.num_calls > self._max_calls

    def _add(self, kind: type[Event], text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._pieces.append(text)

    def _flush(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            self._pieces.clear()
            if self._kind is CallArguments:
                self._events.append(CallArguments(self.num_calls - 1, text))
            elif self._kind is ReasoningPiece:
                self._events.append(ReasoningPiece(text))
            else:
                self._events.append(ContentPiece(text))
        self._kind = None
