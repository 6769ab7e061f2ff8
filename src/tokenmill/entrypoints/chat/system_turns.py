"""System messages where a template takes them: seen by trying.

Agents send several, and some in the middle of a conversation. Many templates take one, as the first
message, and refuse or forget the others; for these, what comes first is joined, and what comes
later is said by the user.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from tokenmill.entrypoints.chat.content_forms import content_forms
from tokenmill.entrypoints.chat.templates import ChatTemplate
from tokenmill.errors import ChatTemplateError

_TOKENS = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
_FIRST, _OTHER = "first system message of a probe", "other system message of a probe"


@dataclass(frozen=True, slots=True)
class SystemForms:
    """Which system messages a template writes."""

    several: bool
    """More than one at the beginning."""
    later: bool
    """One behind a user's message."""


@lru_cache(maxsize=16)
def system_forms(source: str) -> SystemForms:
    """Those of a template, by its source: it renders two short conversations."""
    template = ChatTemplate(source)
    takes_text = content_forms(source).takes_text

    def message(role: str, text: str) -> dict[str, Any]:
        parts = [{"type": "text", "text": text}]
        return {"role": role, "content": text if takes_text else parts}

    first, other = message("system", _FIRST), message("system", _OTHER)
    question, answer = message("user", "a"), message("assistant", "b")
    several = _rendered(template, [first, other, question])
    return SystemForms(
        several=_FIRST in several and _OTHER in several,
        later=_OTHER in _rendered(template, [question, other, answer, question]),
    )


def placed_system_messages(
    messages: list[dict[str, Any]], template: ChatTemplate
) -> list[dict[str, Any]]:
    """The conversation with its system messages where the template takes them."""
    is_system = [message["role"] == "system" for message in messages]
    if not any(is_system[1:]):
        return messages
    forms = system_forms(template.source)
    num_first = is_system.index(False) if False in is_system else len(is_system)
    first, later = messages[:num_first], messages[num_first:]
    if not forms.several:
        first = _joined(first)
    if not forms.later and any(is_system[num_first:]):
        later = _joined(
            [{**each, "role": "user"} if each["role"] == "system" else each for each in later],
            "user",
        )
    return [*first, *later]


def _joined(messages: list[dict[str, Any]], role: str = "system") -> list[dict[str, Any]]:
    """Neighbours of this role as one message."""
    joined: list[dict[str, Any]] = []
    for is_joined, group in groupby(messages, key=lambda each: each["role"] == role):
        neighbours = list(group)
        if is_joined and len(neighbours) > 1:
            content = _all_of([each["content"] for each in neighbours])
            neighbours = [{**neighbours[0], "content": content}]
        joined += neighbours
    return joined


def _all_of(contents: list[Any]) -> Any:
    """Contents as one, each a text or a list of parts."""
    if all(isinstance(each, str) for each in contents):
        return "\n\n".join(contents)  # at once: one by one, thousands would take minutes
    parts: list[Any] = []
    for each in contents:
        parts += [{"type": "text", "text": each}] if isinstance(each, str) else each
    return parts


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    """A conversation; nothing if the template fails on it."""
    try:
        return template.render(
            {**_TOKENS, "messages": messages, "tools": None, "add_generation_prompt": True}
        )
    except ChatTemplateError:
        return ""
