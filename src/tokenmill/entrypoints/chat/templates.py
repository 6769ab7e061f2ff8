"""Chat templates: compiled once, rendered in the sandbox."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError, TemplateSyntaxError

from tokenmill.entrypoints.chat.sandbox import BUDGET, Budget, ChatSandbox, TemplateRefusalError
from tokenmill.errors import ChatTemplateError, ConfigError, shown

MAX_TEMPLATE_CHARS = 2**18
"""Longest source of a template; the longest in use have a tenth of it."""
_RUNTIME_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What expressions of a template may raise: jinja's errors, and those of Python's operators."""

_sandbox = ChatSandbox()


class ChatTemplate:
    """One template. Immutable, so it may be rendered by several threads at once."""

    def __init__(self, source: str) -> None:
        """Raises `ChatTemplateError` if the source is too long or no template."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(
                f"the chat template has {len(source)} characters, the limit is"
                f" {MAX_TEMPLATE_CHARS}.",
                parameter="chat_template",
            )
        self.source = source
        self._template = _compiled(source)

    def mentions(self, word: str) -> bool:
        """Whether the word occurs in the source as a string, as names of roles do."""
        return f"'{word}'" in self.source or f'"{word}"' in self.source

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text for these variables, which must be plain data (see `messages.plain`).

        Raises `ChatTemplateError` if the template refuses them (`raise_exception`), fails, or
        exceeds the sandbox's limits of time and size.
        """
        budget = Budget()
        pieces: list[str] = []
        try:
            for piece in self._template.generate({**variables, BUDGET: budget}):
                budget.spend(piece)
                pieces.append(piece)
        except SecurityError as error:
            raise _error(f"did what its sandbox forbids: {error}") from error
        except TemplateRefusalError as error:
            raise _error(f"refused the messages: {error}") from error
        except _RUNTIME_ERRORS as error:
            raise _error(f"failed on the messages: {type(error).__name__}: {error}") from error
        return "".join(pieces)


def read_template(setting: str | None) -> str | None:
    """The engine's setting `chat_template`: the content of a file if it is the path of one.

    Otherwise it is a source, or the name of one of the model's templates, and stays as it is.
    Requests must not be read so: they would get at any file. Raises `ConfigError` for a path that
    cannot be read.
    """
    if setting is None or is_source(setting):
        return setting
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        if os.sep not in setting and not setting.endswith(".jinja"):
            return setting
        why = "there is no such file"
    except (OSError, RuntimeError, ValueError) as error:
        why = str(error)
    raise ConfigError(
        f"chat_template={shown(setting)} reads as the path of a template, but cannot be read:"
        f" {why}. Give an existing path, or the template itself."
    )


def is_source(text: str) -> bool:
    """Whether a text is a template: one without any tag would say the same to every message."""
    return "{{" in text or "{%" in text


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    try:
        return _sandbox.from_string(source)
    except TemplateSyntaxError as error:
        raise _error(f"has an error in line {error.lineno}: {error.message}") from error
    except SecurityError as error:
        raise _error(f"does what its sandbox forbids: {error}") from error
    except (*_RUNTIME_ERRORS, SyntaxError) as error:
        raise _error(f"cannot be compiled: {error}") from error


def _error(what: str) -> ChatTemplateError:
    return ChatTemplateError(f"the chat template {what}.", parameter="chat_template")
