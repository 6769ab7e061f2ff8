"""What a template wants of messages' contents, where templates differ: seen by trying."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenmill.entrypoints.chat.templates import ChatTemplate
from tokenmill.errors import ChatTemplateError

_TEXT = "content of a probe"
_QUOTED = re.compile("""['"]text['"]""")
"""What a list looks like that was written out as a whole."""
_TOKENS = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")


@dataclass(frozen=True, slots=True)
class ContentForms:
    """How a template takes a message's content."""

    takes_text: bool
    """As one string."""
    takes_parts: bool
    """As a list of parts, each with a type, of which it writes every one."""


@lru_cache(maxsize=16)
def content_forms(source: str) -> ContentForms:
    """Those of a template, by its source: it renders a short message in both forms. One that fails
    on both, for a reason of its own, is taken to want text.
    """
    template = ChatTemplate(source)
    parts = [{"type": "text", "text": _TEXT}, {"type": "text", "text": _TEXT}]
    with_parts = _rendered(template, parts)
    takes_parts = with_parts.count(_TEXT) == 2 and not _QUOTED.search(with_parts)
    takes_text = not takes_parts or _TEXT in _rendered(template, _TEXT)
    return ContentForms(takes_text, takes_parts)


def _rendered(template: ChatTemplate, content: Any) -> str:
    """A message with this content; nothing if the template fails on it."""
    messages = [{"role": "user", "content": content}]
    try:
        return template.render(
            {**_TOKENS, "messages": messages, "tools": None, "add_generation_prompt": True}
        )
    except ChatTemplateError:
        return ""
