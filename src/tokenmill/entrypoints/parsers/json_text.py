"""JSON read as it comes, without building values: where it ends, and whether it is any."""

from __future__ import annotations

import json
import re

from tokenmill.entrypoints.parsers.events import EventSink
from tokenmill.entrypoints.parsers.reader import Emit, Steps, TextReader

_BLANK = frozenset(" \t\r\n")
_IN_STRING = re.compile(r'[^"\\]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_CLOSING = {"{": "}", "[": "]"}

# What may come next.
_VALUE = "value"
_FIRST_KEY = "first key"
_KEY = "key"
_COLON = "colon"
_FIRST_ITEM = "first item"
_COMMA = "comma"
_STRING = "string"
_ESCAPE = "escape"


class JsonScanner:
    """One JSON value. Control characters in strings are let pass, as models write them."""

    def __init__(self) -> None:
        self.is_complete = False
        self.has_failed = False
        self._next = _VALUE
        self._open: list[str] = []
        """Closing brackets to come."""
        self._word: list[str] = []
        """Pieces of a number or a name."""
        self._string_is_key = False

    def scan(self, text: str, pos: int) -> int:
        """Read on; returns the place behind what belongs to the value."""
        end = len(text)
        while pos < end and not (self.is_complete or self.has_failed):
            if self._next is _STRING:
                pos = self._in_string(text, pos)
            elif self._next is _ESCAPE:
                self._next = _STRING
                pos += 1
            elif self._word:
                pos = self._in_word(text, pos)
            else:
                pos = self._structure(text, pos)
        return pos

    def finish(self) -> None:
        """The text ends: a number, which only its successor ends, is complete now."""
        if self._word and not self.has_failed:
            self._end_word()
        if not self.is_complete:
            self.has_failed = True

    def _in_string(self, text: str, pos: int) -> int:
        match = _IN_STRING.match(text, pos)
        assert match is not None  # it may be empty
        pos = match.end()
        if pos == len(text):
            return pos
        if text[pos] == "\\":
            self._next = _ESCAPE
        elif self._string_is_key:
            self._next = _COLON
        else:
            self._end_value()
        return pos + 1

    def _in_word(self, text: str, pos: int) -> int:
        match = _WORD.match(text, pos)
        assert match is not None  # it may be empty
        self._word.append(match.group())
        if match.end() < len(text):
            self._end_word()
        return match.end()

    def _end_word(self) -> None:
        word = "".join(self._word)
        self._word.clear()
        if _SCALAR.fullmatch(word):
            self._end_value()
        else:
            self.has_failed = True

    def _end_value(self) -> None:
        self._next = _COMMA
        self.is_complete = not self._open

    def _structure(self, text: str, pos: int) -> int:
        """Everything between strings and words."""
        char, expected = text[pos], self._next
        if char in _BLANK:
            return pos + 1
        if self._open and char == self._open[-1] and expected in (_COMMA, _FIRST_ITEM, _FIRST_KEY):
            self._open.pop()
            self._end_value()
        elif expected is _COMMA and char == ",":
            self._next = _KEY if self._open[-1] == "}" else _VALUE
        elif expected is _COLON and char == ":":
            self._next = _VALUE
        elif char == '"' and expected in (_KEY, _FIRST_KEY, _VALUE, _FIRST_ITEM):
            self._string_is_key = expected in (_KEY, _FIRST_KEY)
            self._next = _STRING
        elif expected in (_VALUE, _FIRST_ITEM) and char in _CLOSING:
            self._open.append(_CLOSING[char])
            self._next = _FIRST_KEY if char == "{" else _FIRST_ITEM
        elif expected in (_VALUE, _FIRST_ITEM) and _WORD.fullmatch(char):
            self._word.append("")
            return pos
        else:
            self.has_failed = True
            return pos
        return pos + 1


def json_value(reader: TextReader, emit: Emit) -> Steps[bool]:
    """Read one JSON value and emit it as it comes; False where it is none."""
    scanner = JsonScanner()
    while True:
        emit(reader.take(scanner.scan(reader.text, reader.pos)))
        if reader.ended:
            scanner.finish()
        if scanner.is_complete or scanner.has_failed:
            return scanner.is_complete
        yield


def json_string(reader: TextReader) -> Steps[str | None]:
    """Read a string; None if there is none."""
    if (yield from reader.peek()) != '"':
        return None
    pieces: list[str] = []
    if not (yield from json_value(reader, pieces.append)):
        return None
    try:
        return str(json.loads("".join(pieces), strict=False))
    except ValueError:  # an escape that is none
        return None


class PendingCall:
    """A call whose beginning is held back until it is certainly one: until its name is known, and
    its arguments have begun as JSON begins.
    """

    def __init__(
        self, sink: EventSink, name: str | None = None, call_id: str | None = None
    ) -> None:
        """`call_id` is the model's own; None for a new one."""
        self._sink = sink
        self._name = name
        self._call_id = call_id
        self._held: list[str] | None = []
        """Arguments so far; None once the call has begun."""
        self._num_held = 0
        self._is_text = False
        """The arguments are a string or a single value, which is looked at as a whole."""
        self.has_arguments = False
        """All of them are there."""

    @property
    def has_begun(self) -> bool:
        return self._held is None

    def set_name(self, name: str) -> None:
        """The function's name is known."""
        self._name = name
        if self.has_arguments or self._is_clear:
            self._begin()

    def push(self, text: str) -> None:
        """More arguments, which are JSON so far."""
        if self._held is None:
            self._sink.arguments(text)
            return
        if not self._num_held:
            text = text.lstrip()
            self._is_text = text[:1] not in ("{", "")
        if text:
            self._held.append(text)
            self._num_held += len(text.strip())
        if self._name is not None and self._is_clear:
            self._begin()

    def end_arguments(self) -> None:
        """The arguments are complete."""
        if self._held is not None and self._is_text:
            self._held = [_normal_arguments("".join(self._held))]
        self.has_arguments = True
        if self._name is not None:
            self._begin()

    def close(self) -> None:
        """The whole call is complete; without arguments it has none to pass on."""
        if self._held is not None and not self.has_arguments:
            self._held = ["{}"]
        self.has_arguments = True
        if self._name is not None:
            self._begin()

    @property
    def _is_clear(self) -> bool:
        """An object's brace and the character behind it are there."""
        return not self._is_text and self._num_held > 1

    def _begin(self) -> None:
        if self._held is None:
            return
        assert self._name is not None  # callers know it
        self._sink.start_call(self._name, self._call_id)
        for piece in self._held:
            self._sink.arguments(piece)
        self._held = None


def _normal_arguments(text: str) -> str:
    """Arguments that are no object: an object written as a string counts as the object, null as
    none; the rest stays as it is.
    """
    text = text.strip()
    if text == "null":
        return "{}"
    if not text.startswith('"'):
        return text
    try:
        inner = json.loads(text, strict=False)
        return inner if isinstance(json.loads(inner), dict) else text
    except (ValueError, RecursionError):
        return text


def arguments(reader: TextReader, call: PendingCall) -> Steps[bool]:
    """Read a call's arguments; False where they are no JSON."""
    if not (yield from json_value(reader, call.push)):
        return False
    call.end_arguments()
    return True
