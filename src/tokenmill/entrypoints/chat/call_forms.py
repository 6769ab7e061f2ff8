"""What a template wants of messages with calls, where templates differ: seen by trying."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenmill.entrypoints.chat.templates import ChatTemplate
from tokenmill.errors import ChatTemplateError

_ARGUMENT = "argument_of_a_probe"
_TOKENS = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")


@dataclass(frozen=True, slots=True)
class CallForms:
    """How a template takes calls in a history."""

    text_arguments: bool
    """Arguments must be JSON as text: the template joins them to other text. Most templates take
    objects, and write them in a form of their own.
    """
    null_content: bool
    """A message without content beside its calls must have null: the template would take an empty
    text for one more message.
    """


@lru_cache(maxsize=16)
def call_forms(source: str) -> CallForms:
    """Those of a template, by its source: it renders a short conversation in each form."""
    template = ChatTemplate(source)
    arguments: Any = {_ARGUMENT: 1}
    whole = _rendered(template, arguments, "")
    text_arguments = False
    if whole is None or f"'{_ARGUMENT}'" in whole:  # failed, or wrote it as Python would
        as_text = json.dumps(arguments)
        with_text = _rendered(template, as_text, "")
        if with_text is not None and as_text in with_text:
            text_arguments, arguments, whole = True, as_text, with_text
    with_null = _rendered(template, arguments, None)
    return CallForms(
        text_arguments=text_arguments,
        null_content=with_null is not None and "None" not in with_null and with_null != whole,
    )


def _rendered(template: ChatTemplate, arguments: Any, content: str | None) -> str | None:
    """A conversation with one call; None if the template fails on it."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "abcdefghi", "name": "f"},
    ]
    try:
        return template.render(
            {**_TOKENS, "messages": messages, "tools": None, "add_generation_prompt": True}
        )
    except ChatTemplateError:
        return None
