"""Calls written as a list of Python calls: `[get_weather(city="Paris", days=3), now()]`.

Llama 4 puts <|python_start|> before and <|python_end|> behind it. The list has to be the beginning
of an answer and name the request's own tools; anything else is content. A call is passed on when
it is complete: until then nobody knows whether its arguments can be read.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Set
from typing import Any

from tokenmill.entrypoints.parsers.events import EventSink
from tokenmill.entrypoints.parsers.reader import Emit, Steps, TextReader

_NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_IN_QUOTES = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_OUTSIDE = re.compile(r"[^\"'\[\](){}]*")
_MAX_DEPTH = 64
"""Brackets within each other in arguments; Python's own parser knows a limit as well."""
_JSON_NAMES = {"true": True, "false": False, "null": None}
_PREFIX, _SUFFIX = "<|python_start|>", "<|python_end|>"


class PythonicCallParser:
    """One answer; `names` are those of the request's tools."""

    def __init__(self, sink: EventSink, names: Set[str]) -> None:
        self._sink = sink
        self._names = names

    def read(self, reader: TextReader) -> Steps[None]:
        """The whole answer."""
        reader.record()
        yield from reader.blanks()
        yield from reader.literal(_PREFIX)
        yield from reader.blanks()
        if (yield from reader.literal("[")):
            yield from self._calls(reader)
        self._sink.content(reader.recorded())
        yield from reader.rest(self._sink.content)

    def _calls(self, reader: TextReader) -> Steps[None]:
        """The calls of a list. The reader's record is what is content after all."""
        while True:
            yield from reader.blanks()
            name = yield from reader.run(_NAME)
            if name not in self._names or not (yield from reader.literal("(")):
                return
            pieces: list[str] = []
            if not (yield from _to_closing(reader, pieces.append)):
                return
            arguments = read_arguments("".join(pieces))
            if arguments is None:
                return
            self._sink.start_call(name)
            self._sink.arguments(arguments)
            reader.record()
            yield from reader.blanks()
            if (yield from reader.literal("]")):
                yield from reader.blanks()
                yield from reader.literal(_SUFFIX)
                reader.record()
                return
            if not (yield from reader.literal(",")):
                return


def _to_closing(reader: TextReader, emit: Emit) -> Steps[bool]:
    """Read over the parenthesis that closes one just read, and emit what is before it.

    False if there is none: the text ends, brackets do not match, or are nested too deep.
    """
    scanner = _BracketScanner()
    while True:
        end = scanner.scan(reader.text, reader.pos)
        if scanner.is_closed:
            emit(reader.take(end - 1))
            reader.take(end)
            return True
        emit(reader.take(end))
        if scanner.has_failed or reader.ended:
            return False
        yield


class _BracketScanner:
    """Finds the end of what a parenthesis has opened, strings left out of account."""

    def __init__(self) -> None:
        self.is_closed = False
        self.has_failed = False
        self._open = [")"]
        self._quote = ""
        self._is_escaped = False

    def scan(self, text: str, pos: int) -> int:
        """Read on; returns the place behind what was read."""
        end = len(text)
        while pos < end and not (self.is_closed or self.has_failed):
            if self._is_escaped:
                self._is_escaped = False
                pos += 1
                continue
            pattern = _IN_QUOTES[self._quote] if self._quote else _OUTSIDE
            match = pattern.match(text, pos)
            assert match is not None  # it may be empty
            pos = match.end()
            if pos < end:
                self._special(text[pos])
                pos += 1
        return pos

    def _special(self, char: str) -> None:
        if self._quote:
            if char == "\\":
                self._is_escaped = True
            else:
                self._quote = ""
        elif char in _IN_QUOTES:
            self._quote = char
        elif char in _CLOSING:
            self._open.append(_CLOSING[char])
            self.has_failed = len(self._open) > _MAX_DEPTH
        elif char == self._open.pop():
            self.is_closed = not self._open
        else:
            self.has_failed = True


def read_arguments(text: str) -> str | None:
    """Arguments as they stand between a call's parentheses, as JSON; None if they are none.

    Values are Python's literals, or JSON's.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that Python does not know
            call = ast.parse(f"f({text}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {each.arg: _literal(each.value) for each in call.keywords}
        if None in values:  # `**more`
            return None
        return _joined_surrogates(json.dumps(values, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _literal(node: ast.expr) -> Any:
    """The value of a literal. Raises `ValueError` for anything else."""
    match node:
        case ast.Constant(str() | int() | float() | bool() | None as value):
            return value
        case ast.Name(name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(items) | ast.Tuple(items) | ast.Set(items):
            return [_literal(item) for item in items]
        case ast.Dict(keys, values) if None not in keys:
            return {
                _key(_literal(key)): _literal(value)  # type: ignore[arg-type]
                for key, value in zip(keys, values, strict=True)
            }
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
    raise ValueError("no literal")


def _key(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("no key of an object")
    return value


def _joined_surrogates(text: str) -> str:
    """JSON's escapes write characters in two halves, which Python takes for two."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16")
