"""Chat templates: compiled once, rendered in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError, TemplateSyntaxError

from tokenmill.entrypoints.chat.sandbox import BUDGET, Budget, ChatSandbox, TemplateRefusalError
from tokenmill.errors import ChatTemplateError

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
