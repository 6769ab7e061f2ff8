"""Errors of a request that was translated into a chat, in the words of the client that sent it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tokenmill.errors import InvalidRequestError

_LAST_STEP = re.compile(r"(\.[^.\[\]]*|\[[^\[\]]*\])\Z")


@dataclass(slots=True)
class Renames:
    """Paths of a chat's fields to those of the request that became the chat."""

    rules: Sequence[tuple[re.Pattern[str], str]] = ()
    """Patterns, matched at the beginning of a path, and what stands in the request in their
    place."""
    places: dict[str, str] = field(default_factory=dict)
    """Paths, each of which stands for everything below it as well; the longest that fits counts."""
    phrases: Mapping[str, str] = field(default_factory=dict)
    """Words about a chat's fields within a message, and what is said in their place."""

    def path(self, chat_path: str) -> str:
        """The request's path for one of the chat."""
        place = chat_path
        while place:
            if place in self.places:
                return self.places[place] + chat_path[len(place) :]
            step = _LAST_STEP.search(place)
            place = place[: step.start()] if step else ""
        for pattern, replacement in self.rules:
            if match := pattern.match(chat_path):
                return match.expand(replacement) + chat_path[match.end() :]
        return chat_path

    @contextmanager
    def applied(self) -> Iterator[None]:
        """An `InvalidRequestError` about a field of the chat comes out as one about the request."""
        try:
            yield
        except InvalidRequestError as error:
            chat_path = error.parameter or ""
            path = self.path(chat_path)
            message = str(error)
            if message.startswith(chat_path):
                message = path + message[len(chat_path) :]
            for phrase, own in self.phrases.items():
                message = message.replace(phrase, own)
            if (path, message) == (chat_path, str(error)):
                raise
            raise type(error)(message, parameter=path or None) from error


def rules(paths: Mapping[str, str]) -> list[tuple[re.Pattern[str], str]]:
    """Rules from paths in which `[i]` is any index, of which there is at most one."""
    return [
        (
            re.compile(re.escape(chat_path).replace(r"\[i\]", r"\[(\d+)\]") + r"(?=\W|\Z)"),
            path.replace("[i]", r"[\1]"),
        )
        for chat_path, path in paths.items()
    ]
