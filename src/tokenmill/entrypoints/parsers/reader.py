"""Text that comes in pieces, read from front to back.

A parser is a generator that reads as if all text were there and yields where it has to wait for
more. It never looks back, so it is linear in the text, and what it finds does not depend on where
the pieces were cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

_Result = TypeVar("_Result")

Steps = Generator[None, None, _Result]
"""What reads on each time that there is more text, and returns something in the end."""
Emit = Callable[[str], object]

_BLANKS = re.compile(r"[ \t\r\n]*")


def ignore(text: str) -> None:
    """An `Emit` for what nobody needs."""


class Marks:
    """Texts to look for, none of which begins with another one."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(texts)
        self._pattern = re.compile("|".join(map(re.escape, self.texts)))
        self._longest = max(map(len, self.texts))

    def search(self, text: str, start: int) -> re.Match[str] | None:
        """The first of them from `start` on."""
        return self._pattern.search(text, start)

    def num_held(self, text: str, start: int) -> int:
        """How many characters at the end may be the beginning of one."""
        first = max(start, len(text) - self._longest + 1)
        for i in range(first, len(text)):
            if any(mark.startswith(text[i:]) for mark in self.texts):
                return len(text) - i
        return 0


class TextReader:
    """The text of one parser, and how far it has been read."""

    def __init__(self) -> None:
        self.text = ""
        """What is known and not thrown away."""
        self.pos = 0
        """Where the text begins that has not been read."""
        self.ended = False
        self._recorded: list[str] | None = None

    def push(self, text: str) -> None:
        """More text."""
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def take(self, end: int) -> str:
        """Read up to the place `end` of `text`."""
        piece = self.text[self.pos : end]
        self.pos = end
        if self._recorded is not None:
            self._recorded.append(piece)
        return piece

    def record(self, before: str = "") -> None:
        """Remember all that is read from here on, behind `before`."""
        self._recorded = [before]

    def recorded(self) -> str:
        """What was read since `record`, which ends here."""
        text = "".join(self._recorded or ())
        self._recorded = None
        return text

    def peek(self) -> Steps[str]:
        """The next character; nothing at the end."""
        while self.pos == len(self.text) and not self.ended:
            yield
        return self.text[self.pos : self.pos + 1]

    def is_next(self, wanted: str) -> Steps[bool]:
        """Whether `wanted` comes next; nothing is read."""
        while True:
            if self.text.startswith(wanted, self.pos):
                return True
            end = self.pos + len(wanted)
            if self.ended or not wanted.startswith(self.text[self.pos : end]):
                return False
            yield

    def literal(self, wanted: str) -> Steps[bool]:
        """Read `wanted` if that comes next, else nothing."""
        if not (yield from self.is_next(wanted)):
            return False
        self.take(self.pos + len(wanted))
        return True

    def run(self, characters: re.Pattern[str]) -> Steps[str]:
        """Read as many as there are; the pattern is a starred class of characters."""
        pieces: list[str] = []
        while True:
            match = characters.match(self.text, self.pos)
            assert match is not None  # it may be empty
            pieces.append(self.take(match.end()))
            if self.pos < len(self.text) or self.ended:
                return "".join(pieces)
            yield

    def blanks(self) -> Steps[str]:
        """Read white space."""
        return (yield from self.run(_BLANKS))

    def until(self, marks: Marks, emit: Emit) -> Steps[str | None]:
        """Read up to the first of the marks and over it; emit what is before it, as it comes.

        Returns the mark, or None at the end of the text.
        """
        while True:
            found = marks.search(self.text, self.pos)
            if found is not None:
                emit(self.take(found.start()))
                self.take(found.end())
                return found.group()
            num_held = 0 if self.ended else marks.num_held(self.text, self.pos)
            emit(self.take(len(self.text) - num_held))
            if self.ended:
                return None
            yield

    def rest(self, emit: Emit) -> Steps[None]:
        """Emit everything to the end."""
        while True:
            emit(self.take(len(self.text)))
            if self.ended:
                return
            yield
